# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One keyword of `generate` is enough: a callable, or a folder as people put them on the Hub."""

from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from hf_blend import BlendCache, ChunkStore, ConfigError, blended, sparse_decoding
from hf_blend.evaluation.bundled import load_model, quickstart_questions

FOLDER = str(Path(__file__).resolve().parent.parent / "examples" / "custom_generate")


@pytest.fixture(scope="module")
def bundled():
    return load_model()


@pytest.fixture(scope="module")
def asked(bundled):
    """Prompt, store with its chunks, and the answer that is wanted."""
    model, tokenizer = bundled
    one = quickstart_questions()[0]
    store = ChunkStore.open("memory://")
    store.add(model, tokenizer, one["chunks"])
    inputs = BlendCache(model, store).inputs(tokenizer, chunks=one["chunks"], question=one["question"])
    return inputs, store, one


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 1}])
def test_the_keyword_gives_what_a_cache_gives(bundled, asked, options):
    (model, _), (inputs, store, _) = bundled, asked
    keyword = blended(store, recompute_ratio=0.3)
    wanted = model.generate(
        **inputs, past_key_values=BlendCache(model, store, recompute_ratio=0.3), max_new_tokens=6, **options
    )
    got = model.generate(**inputs, custom_generate=keyword, max_new_tokens=6, **options)
    assert torch.equal(got, wanted)
    assert keyword.report.loaded_chunks > 0
    assert 0 < keyword.report.charged_budget < 1


def test_a_cache_that_is_in_use_is_refused(bundled, asked):
    (model, _), (inputs, store, _) = bundled, asked
    used = BlendCache(model, store)
    model.generate(**inputs, past_key_values=used, max_new_tokens=1)
    longer = {name: torch.cat([value, value[:, -1:]], dim=1) for name, value in inputs.items()}
    with pytest.raises(ConfigError, match="Pass a BlendCache as past_key_values"):
        model.generate(**longer, past_key_values=used, custom_generate=blended(store), max_new_tokens=2)


def test_a_folder_takes_documents_and_a_question(bundled, asked, tmp_path, monkeypatch):
    (model, tokenizer), (inputs, _, one) = bundled, asked
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    output = model.generate(
        custom_generate=FOLDER,
        trust_remote_code=True,
        tokenizer=tokenizer,
        chunks=one["chunks"],
        question=one["question"],
        store=str(tmp_path / "kv"),
        max_new_tokens=6,
    )
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.strip() == one["answer"]
    assert len(ChunkStore.open(tmp_path / "kv")) > 0


def test_the_keyword_decodes_sparsely_as_the_block_does(bundled, asked, untouched):
    (model, _), (inputs, store, _) = bundled, asked
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
    got = model.generate(**short, custom_generate=blended(store, sparse={"share": 0.5, "min_tokens": 0}))
    assert torch.equal(got, model.generate(**short))
    assert blended(store, sparse=0.5).sparse.share == 0.5
    away = blended(store, sparse="auto", kv_device_map="cpu")
    assert blended(store, sparse="auto").sparse.min_tokens > away.sparse.min_tokens
    for wrong, message in (({"shares": 1}, "Did you mean 'share'"), (0, "share is 0"), ("some", 'expected "auto"')):
        with pytest.raises(ConfigError, match=message):
            blended(store, sparse=wrong)
