# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A prompt that is one text keeps its ids, and what is inside its chunks is reused."""

import logging
from difflib import SequenceMatcher

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, PromptError, blended
from hf_blend.prefill.report import warn_once
from hf_blend.prompt.pieces import tokenize, tokenizer_digest
from hf_blend.prompt.text import build_text
from tests.asking import memory
from tests.chat_templates import DOCUMENTS, JOINED, QUESTION

WORDS = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
JOINS = {
    "a blank line": "\n\n".join,
    "a space": " ".join,
    "nothing": "".join,
    "numbers": lambda texts: "\n".join(f"Document [{number}]: {text}" for number, text in enumerate(texts, 1)),
    "tags": lambda texts: "".join(f"<doc>{text}</doc>" for text in texts),
}


@pytest.fixture(autouse=True)
def each_warning_is_new():
    warn_once.cache_clear()


def longest_run(prompt, chunk):
    """How many neighbours of a chunk are in a prompt at most."""
    return SequenceMatcher(None, prompt, chunk, autojunk=False).find_longest_match().size


@pytest.mark.parametrize(
    ("known", "join"),
    [*(("spaces", join) for join in JOINS), ("bytes", "nothing"), ("bytes", "tags")],
    indirect=["known"],
)
def test_inputs_from_text_are_tokenizers_ids_and_reuse_longest_run_of_each_chunk(known, join):
    model, tokenizer = known
    text = f"Answer the question.\n\n{JOINS[join](DOCUMENTS)}\n\n{QUESTION}"
    cache = BlendCache(model, memory(), recompute_ratio=1.0)
    inputs = cache.inputs_from_text(tokenizer, text, DOCUMENTS[::-1])
    expected = tokenizer(text, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], expected["input_ids"])
    output = model.generate(**inputs, past_key_values=cache, **WORDS)
    assert torch.equal(output, model.generate(**expected, **WORDS))
    ids = expected["input_ids"][0].tolist()
    runs = 0
    seams = 0
    for document in DOCUMENTS:
        chunk = tokenize(tokenizer, document)
        run = longest_run(ids, chunk)
        runs += run
        seams += len(chunk) - run
    assert cache.report.reusable_tokens == runs
    assert cache.report.seam_tokens == seams
    store = memory()
    keyword = blended(store, recompute_ratio=1.0)
    store.add(model, tokenizer, DOCUMENTS)  # whose tokens generate finds alone
    assert torch.equal(model.generate(**expected, custom_generate=keyword, **WORDS), output)
    assert keyword.report.reusable_tokens == runs
    assert keyword.report.loaded_chunks == 3
    assert keyword.report.computed_chunks == 0


def test_reused_values_are_stored_ones_of_just_these_tokens(known):
    model, tokenizer = known
    store = memory()
    (key,) = store.add(model, tokenizer, DOCUMENTS[2:])
    cache = BlendCache(model, store, recompute_ratio=0.0, selector="none")
    inputs = cache.inputs_from_text(tokenizer, f"{DOCUMENTS[0]}\n{DOCUMENTS[2]}\n{QUESTION}")
    ids = inputs["input_ids"][0].tolist()
    (found,) = store.find(key.fingerprint, key.chunk_prefix_ids, ids)
    assert 0 < found.first < 4
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    chunk = store.get(key)
    for layer, (_, values) in zip(cache.layers, chunk.layers, strict=True):
        here = layer.values[0, :, found.start :]
        stored = values[:, found.first : found.first + found.tokens]
        assert torch.equal(here[:, : found.tokens], stored)
    with torch.no_grad():
        plain = model(inputs["input_ids"], use_cache=True).past_key_values
    assert torch.allclose(cache.layers[0].keys, plain.layers[0].keys, atol=1e-4), "at layer 0 K depends on the token"


def test_build_text_stores_chunk_of_which_every_token_differs_as_prompt_has_it(known):
    tokenizer = known[1]
    text = "Ines: " + "".join(f"{letter}​" for letter in DOCUMENTS[1][:40]) + QUESTION
    chunk = text[6:86]

    class Other(type(tokenizer)):
        def encode(self, piece, **given):
            return [token + 1 for token in super().encode(piece, **given)] if piece == chunk else super().encode(piece)

    tokenizer.__class__, own = Other, type(tokenizer)
    try:
        prompt = build_text(tokenizer, text, [chunk], special=True)
    finally:
        tokenizer.__class__ = own
    (span,) = prompt.spans
    assert span.token_ids == prompt.ids[span.start : span.stop]
    assert span.first == 0


def test_tokenizer_of_larger_model_is_refused_before_any_forward(known, tiny_model, monkeypatch):
    model = tiny_model(vocab_size=100, num_hidden_layers=2)
    tokenizer = known[1]
    store = memory()
    cache = BlendCache(model, store)
    monkeypatch.setattr(type(model), "forward", None)
    for make in (
        lambda: cache.inputs_from_text(tokenizer, JOINED),
        lambda: cache.inputs(tokenizer, chunks=DOCUMENTS, question=QUESTION),
        lambda: store.add(model, tokenizer, DOCUMENTS),
    ):
        with pytest.raises(PromptError, match=r"gave id \d+, but the model knows 100 ids, 0 to 99.* Load both"):
            make()


def test_fallback_reason_says_once_that_store_finds_nothing(known, caplog):
    model, tokenizer = known
    store = memory()
    asked = tokenizer(QUESTION, return_tensors="pt")

    def ask():
        cache = BlendCache(model, store)
        model.generate(**asked, past_key_values=cache, max_new_tokens=2)
        return cache.report.fallback_reason

    assert ask().startswith("the store is empty")
    store.add(model, tokenizer, DOCUMENTS)
    with caplog.at_level(logging.WARNING):
        reasons = {ask(), ask()}
    (reason,) = reasons
    assert reason.startswith("the store holds 3 chunks of this model, but none of them is in the prompt. Put the")
    assert len(caplog.records) == 1


def test_fallback_reason_and_notice_name_another_tokenizer(models, tmp_path, caplog):
    (model, tokenizer) = models["spaces"]
    (_, other) = models["bytes"]
    assert tokenizer_digest(tokenizer) == tokenizer_digest(tokenizer) != tokenizer_digest(other) != ""
    with ChunkStore.open(tmp_path) as store:
        store.add(model, other, DOCUMENTS)
        store.add(model, other, DOCUMENTS, chunk_prefix_ids=(1,))
    with ChunkStore.open(tmp_path) as store, caplog.at_level(logging.WARNING):
        cache = BlendCache(model, store)
        inputs = cache.inputs_from_text(tokenizer, f"{JOINED}\n{QUESTION}")
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
        named = f"nother tokenizer ({tokenizer_digest(other)}) than this one ({tokenizer_digest(tokenizer)})"
        assert named in cache.report.fallback_reason
        cache = BlendCache(model, store, chunk_prefix_ids=(1,))
        inputs = cache.inputs(tokenizer, chunks=[tokenize(other, one) for one in DOCUMENTS], question=QUESTION)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
    assert named in cache.report.notice
    assert cache.report.notice in str(cache.report)
    assert len(caplog.records) == 2
