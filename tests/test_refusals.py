# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What makes no sense is refused before a model runs or a file is made: the error says what was got and what to do."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_model

from hf_blend import BlendCache, ChunkStore, ConfigError, PromptError
from hf_blend.context.self_extend import self_extend
from hf_blend.sparse.config import SparseConfig
from tests.asking import memory
from tests.chat_templates import ASKED, CHATML, DOCUMENTS, JOINED
from tests.conftest import shared_zoo_model
from tests.sequences import filled as filled_cache

TABLE = json.loads(Path(__file__).with_name("refusals.json").read_text("utf-8"))
MESSAGES = [  # messages, documents, further arguments
    ([ASKED], ["Somebody else."], {}, r"document 0 \('Somebody else.'\) is not in the prompt. Put its text"),
    ([ASKED], JOINED, {}, r"expected a list of documents. Write \[document\]"),
    ([{"role": "user"}], (), {}, "the chat template refused the 1 messages: "),
    ([ASKED], (), {"chat_template": None}, "has no chat template.*inputs and inputs_from_text"),
]
TEXTS = [
    (JOINED, ["Not there."], "is not in the prompt"),
    ("caf\ud800", None, "half of a surrogate pair"),
    ([JOINED], DOCUMENTS, "a batch of 1 prompts came with 3 documents"),
]
SPARSE = [("share", 1.5), ("block_tokens", 0)]
EXTENDED = [("window_tokens", 64), ("group_tokens", 0)]


@pytest.mark.parametrize(("settings", "says"), TABLE["settings of a cache"])
def test_cache_settings_are_refused_by_name(settings, says, shared_model):
    with pytest.raises((ConfigError, LookupError), match=f"(?s){says}"):
        BlendCache(shared_model(), memory(), **settings)


@pytest.mark.parametrize("setting", [{"kv_bits": 8}, {"kv_device_map": "cpu"}])
def test_cache_settings_of_full_layers_are_refused_for_windows(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"Leave {name} out"):
        BlendCache(shared_zoo_model("mistral"), memory(), **setting)


@pytest.mark.parametrize(("pieces", "says"), TABLE["arguments of inputs, without a tokenizer"])
def test_inputs_refuse_chunks_that_make_no_prompt(pieces, says, shared_model):
    with pytest.raises(PromptError, match=says):
        BlendCache(shared_model(), memory()).inputs(None, **pieces)


@pytest.mark.parametrize(("messages", "documents", "given", "says"), MESSAGES)
def test_inputs_from_messages_refuse_what_makes_no_prompt(messages, documents, given, says, known):
    model, tokenizer = known
    cache = BlendCache(model, memory())
    with pytest.raises(PromptError, match=says):
        cache.inputs_from_messages(tokenizer, messages, documents, **{"chat_template": CHATML, **given})


@pytest.mark.parametrize(("text", "chunks", "says"), TEXTS)
def test_inputs_from_text_refuse_what_makes_no_prompt(text, chunks, says, known):
    model, tokenizer = known
    cache = BlendCache(model, memory())
    with pytest.raises(PromptError, match=says):
        cache.inputs_from_text(tokenizer, text, chunks, add_special_tokens=True)


@pytest.mark.parametrize(("partial", "says"), TABLE["partial loading"])
def test_store_refuses_settings_of_partial_loading_and_makes_no_file(partial, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        ChunkStore.open(tmp_path / "store", partial=partial)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("name", "value"), SPARSE)
def test_sparse_config_refuses_numbers_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        SparseConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), EXTENDED)
def test_self_extend_refuses_numbers_out_of_range(name, value, shared_model):
    with pytest.raises(ConfigError), self_extend(shared_model(), **{"trained_tokens": 64, name: value}):
        pass


@pytest.mark.parametrize(("name", "arguments", "says"), TABLE["whole numbers of operations on sequences"])
def test_operations_of_sequences_refuse_what_is_no_whole_number_in_range(name, arguments, says):
    cache = filled_cache(tiny_model("llama"), 8)
    with pytest.raises(ConfigError, match=f"{says}, expected a whole number"):
        getattr(cache, name)(*arguments)
    assert cache.positions() == list(range(8))
