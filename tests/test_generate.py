# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every mode of stock `generate` takes a blend cache, for one request or several, or the one keyword `blended`."""

from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils
from worlds import reference_questions

from hf_blend import BlendCache, ChunkStore, ConfigError, blended, sparse_decoding
from tests.asking import apart, generated, memory, prefill, prepared
from tests.conftest import random_pieces

FOLDER = str(Path(__file__).resolve().parent.parent / "examples" / "custom_generate")
SAMPLED_BEAMS = {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}
LOOKUP = {"prompt_lookup_num_tokens": 4}
REQUESTS = [  # different prefixes, numbers of chunks, lengths
    random_pieces(),
    random_pieces((29,), prefix=0, question=3, seed=1),
    random_pieces((8, 12, 5, 9), prefix=11, question=6, seed=2),
]


def run(model, inputs, cache=None, **ways):
    torch.manual_seed(11)
    return generated(model, inputs, cache, **{"max_new_tokens": 12, **ways})


def answers(model, inputs, cache=None, **ways):
    return run(model, inputs, cache, **ways)[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("ways", [SAMPLED_BEAMS, LOOKUP])
def test_generate_at_any_ratio_continues_same_blended_prefill_in_every_mode(shared_model, ways):
    model = shared_model()
    kept = memory()
    found = []
    chosen = []
    for settings in (ways, ways, {}):
        cache, inputs = prepared(model, REQUESTS[0], store=kept, recompute_ratio=0.15)
        found.append(run(model, inputs, cache, **settings))
        chosen.append(cache.report.chosen_columns[0])
    first, again, greedy = found
    assert torch.equal(first, again)
    assert chosen[0] == chosen[2]
    if ways is LOOKUP:
        assert torch.equal(first, greedy)


@pytest.mark.parametrize(("family", "ways"), [("llama", {}), ("gemma3_text", {"num_beams": 4})])
def test_batch_gives_text_and_logits_of_its_single_requests(shared_model, family, ways):
    model = shared_model(family)
    kept = memory()
    cache, inputs = prepared(model, *REQUESTS, store=kept, recompute_ratio=0.15)
    together = answers(model, inputs, cache, **ways)
    assert 0 < cache.report.charged_budget < 0.8
    cache, _ = prepared(model, *REQUESTS, store=kept, recompute_ratio=0.15)
    logits = prefill(model, inputs, cache)
    for row, request in enumerate(REQUESTS):
        single, alone = prepared(model, request, store=kept, recompute_ratio=0.15)
        answer = answers(model, alone, single, **ways)
        assert torch.equal(together[row], answer[0])
        single, _ = prepared(model, request, store=kept, recompute_ratio=0.15)
        expected = prefill(model, alone, single)
        assert apart(logits[row], expected[0]) <= 1e-5


def test_batch_of_prompts_found_by_content_may_hit_differently_from_row_to_row(shared_model):
    """All chunks of the first request are stored, one of the third, none of the second."""
    model = shared_model()
    store = memory()
    store.add(model, None, [*REQUESTS[0]["chunks"], REQUESTS[2]["chunks"][1]])
    _, inputs = prepared(model, *REQUESTS)
    cache = BlendCache(model, store, recompute_ratio=0.15)
    together = answers(model, inputs, cache)
    assert cache.report.reusable_tokens == 71 + 12
    assert [*map(len, cache.report.chosen_columns)] == [11, 0, 2]
    for row, request in enumerate(REQUESTS):
        _, alone = prepared(model, request)
        single = BlendCache(model, store, recompute_ratio=0.15)
        answer = answers(model, alone, single)
        assert torch.equal(together[row], answer[0])


# One keyword is enough: a callable, or a folder as people put them on the Hub.


@pytest.fixture(scope="module")
def asked(reference):
    """Prompt, store with its chunks, and the question with the answer that is expected."""
    model, tokenizer = reference
    one = reference_questions()[0]
    store = memory()
    store.add(model, tokenizer, one["chunks"])
    inputs = BlendCache(model, store).inputs(tokenizer, chunks=one["chunks"], question=one["question"])
    return inputs, store, one


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"do_sample": True, "top_k": 1}])
def test_blended_gives_what_cache_gives(reference, asked, options):
    model, _ = reference
    inputs, store, _ = asked
    keyword = blended(store, recompute_ratio=0.3)
    cache = BlendCache(model, store, recompute_ratio=0.3)
    expected = model.generate(**inputs, past_key_values=cache, max_new_tokens=6, **options)
    got = model.generate(**inputs, custom_generate=keyword, max_new_tokens=6, **options)
    assert torch.equal(got, expected)
    assert keyword.report.loaded_chunks > 0
    assert 0 < keyword.report.charged_budget < 1


def test_custom_generate_folder_takes_text_and_documents(reference, asked, tmp_path, monkeypatch):
    model, tokenizer = reference
    _, _, one = asked
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    text = "\n".join([*one["chunks"], one["question"]])
    texts = {"text": text, "documents": one["chunks"], "tokenizer": tokenizer}
    given = {"custom_generate": FOLDER, "trust_remote_code": True, "store": str(tmp_path / "kv")}
    output = model.generate(**texts, **given, selector="kv-deviation", max_new_tokens=6)
    tokens = len(tokenizer(text)["input_ids"])
    answer = tokenizer.decode(output[0, tokens:], skip_special_tokens=True)
    assert answer.strip() == one["answer"]
    assert len(ChunkStore.open(tmp_path / "kv")) > 0


def test_blended_decodes_sparsely_as_sparse_decoding_does(reference, asked, untouched):
    model, _ = reference
    inputs, store, _ = asked
    ways = {"share": 0.25, "block_tokens": 8, "min_tokens": 0}
    cache = BlendCache(model, store, recompute_ratio=0.3)
    with sparse_decoding(model, cache, **ways) as session:
        expected = model.generate(**inputs, past_key_values=cache, max_new_tokens=12)
    keyword = blended(store, recompute_ratio=0.3, sparse=ways)
    with untouched(model):
        got = model.generate(**inputs, custom_generate=keyword, max_new_tokens=12)
    assert torch.equal(got, expected)
    assert vars(keyword.sparse_metrics) == vars(session.metrics)
    assert keyword.sparse_metrics.steps > 0
    short = {name: value[:, -5:] for name, value in inputs.items()}  # less than a block is looked at whole
    keyword = blended(store, sparse={"share": 0.5, "min_tokens": 0})
    got = model.generate(**short, custom_generate=keyword)
    assert torch.equal(got, model.generate(**short))
    assert blended(store, sparse=0.5).sparse.share == 0.5
    assert blended(store, sparse="auto").sparse.min_tokens == 16384
    with pytest.raises(ConfigError, match="share is 0"):
        blended(store, sparse=0)
