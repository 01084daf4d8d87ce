# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What chunks are computed behind where nothing is said: which tokens, that they are used, and who finds them."""

import zlib

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import BlendCache
from hf_blend.model.capture import LEAST_POSITIONS, MOST_TOKENS, TEXT, default_prefix
from hf_blend.model.identity import fingerprint
from tests.asking import memory
from tests.conftest import random_ids, random_pieces

CHUNKS = [random_ids(20, seed) for seed in (1, 2)]


class Words:
    """A tokenizer whose tokens are words."""

    unk_token_id = 2
    pad_token_id = 0

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [3 + zlib.crc32(word.encode()) % 50 for word in text.split()]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=2048)


def prefix_of(model):
    return (model.config.bos_token_id, *Words().encode(TEXT, add_special_tokens=False))


def test_default_prefix_is_bos_and_text_in_ids_of_tokenizer(model, store):
    assert default_prefix(model, Words()) == prefix_of(model)
    (key,) = store.add(model, Words(), CHUNKS[:1])
    assert key.chunk_prefix_ids == prefix_of(model)


@pytest.mark.parametrize("why", ["no tokenizer", "unknown words", "a letter a token", "few positions", "a mixer"])
def test_default_prefix_is_bos_alone_where_text_does_not_suit(model, why):
    tokenizer = None if why == "no tokenizer" else Words()
    if why == "unknown words":
        tokenizer.unk_token_id = Words().encode(TEXT, add_special_tokens=False)[7]
    if why == "a letter a token":
        tokenizer.encode = lambda text, add_special_tokens: [5] * len(text)
        assert len(TEXT) > MOST_TOKENS
    if why == "few positions":
        model = tiny_model("llama", max_position_embeddings=LEAST_POSITIONS - 1)
    if why == "a mixer":
        model = tiny_model("qwen3_next", max_position_embeddings=2048)
    assert default_prefix(model, tokenizer) == (model.config.bos_token_id,)


def test_prompt_of_which_no_tokenizer_is_known_finds_what_is_behind_text(model, store):
    keys = store.add(model, Words(), CHUNKS)
    assert store.stored_prefix(model, fingerprint(model)) == prefix_of(model)
    ids = torch.tensor([[1, *random_ids(9, 5), *CHUNKS[1], *CHUNKS[0], *random_ids(6, 6)]])
    cache = BlendCache(model, store, recompute_ratio=0.0)
    cache.get_seq_length()  # from here on it sees the model's call
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    assert cache.report.loaded_chunks == len(keys)
    with memory() as empty:
        assert empty.stored_prefix(model, fingerprint(model)) == (model.config.bos_token_id,)


def test_chunk_that_fits_model_but_not_behind_text_is_computed_in_its_place(store):
    model = tiny_model("llama", max_position_embeddings=LEAST_POSITIONS)
    pieces = {**random_pieces(), "chunks": [random_ids(LEAST_POSITIONS - 60, 3), CHUNKS[0]]}
    cache = BlendCache(model, store, recompute_ratio=0.0)
    inputs = cache.inputs(Words(), **pieces)
    with torch.no_grad():
        model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.state.chunk_prefix_ids == prefix_of(model)
    assert cache.report.reusable_tokens == len(CHUNKS[0])
