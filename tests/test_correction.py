# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A correction of stored chunks: what it adds, whose keys it changes, and what it never touches."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, PromptError
from hf_blend.evaluation.indexing import Indexer
from hf_blend.evaluation.retrieving import Piece
from hf_blend.model.anatomy import default_sink
from hf_blend.model.canary import compute_chunks
from hf_blend.model.capture import capture_chunks
from hf_blend.model.correction import DECAYS, ContextCorrection
from hf_blend.model.fingerprint import fingerprint
from hf_blend.store.chunk import ChunkKey
from tests.asking import prefilled
from tests.conftest import chunk_prompts, random_ids, random_pieces

FAMILIES = ("llama", "gpt_neox", "phi", "qwen2")


@pytest.fixture(scope="module")
def fitted(fitted_correction):
    return ContextCorrection.load(fitted_correction)


def added(fitted, model, ids):
    """What a correction adds to a chunk: by layer (to K, to V), and the chunk as it was."""
    with ChunkStore.open("memory://") as store:
        [key] = store.add(model, None, [ids])
        plain = store.get(key)
    corrected = fitted.corrected(model, plain)
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(plain.layers, corrected.layers, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_0_needs_no_correction_in_any_family_because_its_k_and_v_know_no_context(shared_model, family):
    model = shared_model(family)
    found = ContextCorrection.fit(model, chunk_prompts())
    parts = added(found, model, random_ids(12, 3))
    assert max(float(part.abs().max()) for part in parts[0]) < 1e-4
    assert max(float(part.abs().max()) for part in parts[-1]) > 1e-3


def test_constant_correction_of_k_is_turned_to_each_token_s_position(shared_model):
    model = shared_model("llama")
    config = model.config
    heads, width = config.num_key_value_heads, config.head_dim
    both, sink = 2 * heads * width, len(default_sink(model))
    constant = torch.randn(heads, width, generator=torch.Generator().manual_seed(0))
    down = torch.zeros(both + 1 + len(DECAYS), 1)
    down[both] = 1.0
    up = torch.cat([constant.flatten(), torch.zeros(heads * width)])[None]
    made = ContextCorrection(fingerprint(model), {1: (down, up)})
    keys, values = added(made, model, random_ids(12, 3))[1]
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(sink, sink + 12)[None])
    assert torch.allclose(keys, constant[:, None] * cos + rotate_half(constant[:, None]) * sin, atol=1e-5)
    assert not values.any()


def test_fitted_map_brings_chunks_that_it_has_not_seen_nearer_to_the_prompt_s(shared_model, fitted):
    model, errors = shared_model("llama"), {}
    for ids, placed in list(chunk_prompts(8))[6:]:  # not fitted
        whole = DynamicCache(config=model.config)
        with torch.no_grad():
            model(torch.tensor([ids]), past_key_values=whole)
        for start, tokens, _, count in placed:
            change = added(fitted, model, tokens)
            with ChunkStore.open("memory://") as store:
                alone = store.get(store.add(model, None, [tokens])[0])
            for layer in range(1, len(alone.layers)):
                true = whole.layers[layer].values[0, :, start : start + count]
                for name, found in (("plain", 0), ("corrected", change[layer][1])):
                    errors[name] = errors.get(name, 0.0) + float(
                        (alone.layers[layer][1] + found - true).square().sum()
                    )
    assert errors["corrected"] < 0.9 * errors["plain"]


def test_corrected_and_plain_chunks_never_meet_and_what_a_prompt_begins_with_stays_exact(
    shared_model, fitted_correction, tmp_path
):
    model, pieces = shared_model("llama"), random_pieces()
    seen = {}
    for name, options in (("plain", {}), ("corrected", {"correction": fitted_correction})):
        with ChunkStore.open(tmp_path / "store", **options) as store:
            cache, _, inputs = prefilled(model, pieces, store=store, recompute_ratio=0.0, selector="none")
            assert cache.report.computed_chunks == (4 if name == "plain" else 3)  # the prefix is found by both
            seen[name] = cache
    with ChunkStore.open(tmp_path / "store", correction=fitted_correction) as store:
        again, *_ = prefilled(model, pieces, store=store, recompute_ratio=0.0, selector="none")
        assert again.report.computed_chunks == 0
    prefix = len(inputs["input_ids"][0]) - sum(map(len, pieces["chunks"])) - len(pieces["question"])
    for part in ("keys", "values"):
        plain, corrected = (getattr(seen[name].layers[-1], part)[0, :, : prefix + 3] for name in seen)
        assert torch.equal(plain[:, :prefix], corrected[:, :prefix])
        assert not torch.equal(plain[:, prefix:], corrected[:, prefix:])


def test_first_chunk_behind_nothing_else_is_recomputed_where_it_is_corrected(shared_model, fitted_correction):
    model = shared_model("llama")
    pieces = {**random_pieces(), "prefix": list(default_sink(model))}
    exact = []
    for options in ({}, {"correction": fitted_correction}):
        with ChunkStore.open("memory://", **options) as store:
            cache, *_ = prefilled(model, pieces, store=store, recompute_ratio=1.0)
            exact.append(cache.report.exact_tokens)
    assert exact[0] > exact[1]


def test_correction_of_another_model_and_files_that_hold_none_are_refused_by_name(
    shared_model, fitted, fitted_correction, tmp_path
):
    with (
        ChunkStore.open("memory://", correction=fitted_correction) as store,
        pytest.raises(ConfigError, match="fitted for the mod"),
    ):
        store.add(shared_model("qwen2"), None, [random_ids(9, 1)])
    save_file({"0.down": torch.ones(3, 2)}, tmp_path / "other")
    (tmp_path / "text").write_text("no tensors")
    replace(fitted, maps={0: (torch.full((3, 2), torch.nan), torch.ones(2, 2))}).save(tmp_path / "nan")
    for name in ("other", "text", "nan", "nothing"):
        with pytest.raises(ConfigError, match=r"correction|format"):
            ChunkStore.open("memory://", correction=tmp_path / name)


def test_file_has_the_digest_of_what_was_saved_and_any_change_is_another_key(shared_model, fitted, fitted_correction):
    model, loaded = shared_model("llama"), ContextCorrection.load(fitted_correction)
    assert loaded.digest == fitted.digest
    maps = {**loaded.maps, 1: (loaded.maps[1][0] * 1.01, loaded.maps[1][1])}
    assert replace(loaded, maps=maps).identity(fingerprint(model)) != loaded.identity(fingerprint(model))


@pytest.mark.parametrize("rank", [1, 4])
def test_rank_is_that_of_every_layer_s_map(shared_model, rank):
    found = ContextCorrection.fit(shared_model("llama"), chunk_prompts(3), rank=rank)
    assert {down.shape[1] for down, _ in found.maps.values()} == {rank}


def test_documents_indexed_with_and_without_a_correction_are_listed_beside_each_other(
    shared_model, fitted_correction, tmp_path
):
    pieces, found = [Piece("notes", 0, "", tuple(random_ids(9, 1)))], []
    for options in ({}, {"correction": fitted_correction}):
        with ChunkStore.open(tmp_path / "store", **options) as store:
            indexer = Indexer(shared_model("llama"), None, store, pieces)
            assert indexer.keys[0].fingerprint == indexer.fingerprint, "by which a document and its chunks are removed"
            found.append(indexer.fingerprint)
    assert found[0] != found[1]


def test_chunks_of_a_correction_are_behind_what_it_was_fitted_behind(shared_model, tmp_path):
    model, prefix = shared_model("llama"), (1, *random_ids(8, 4))
    made = ContextCorrection.fit(model, chunk_prompts(3), chunk_prefix_ids=prefix)
    made.save(tmp_path / "file")
    with ChunkStore.open("memory://", correction=tmp_path / "file") as store:
        assert store.correction.digest == made.digest
        [key] = store.add(model, None, [random_ids(9, 1)])
        assert key.chunk_prefix_ids == store.default_prefix(model, None) == prefix
        [plain] = capture_chunks(model, [key])
        assert torch.equal(store.get(key).layers[-1][1], made.corrected(model, plain).layers[-1][1])
    assert replace(made, prefix=(1,)).digest != made.digest


def test_prefix_that_the_model_has_no_ids_for_is_refused(shared_model):
    model = shared_model("llama")
    made = ContextCorrection.fit(model, chunk_prompts(2), rank=1)
    key = ChunkKey(made.identity(fingerprint(model)), (model.config.vocab_size,), tuple(random_ids(9, 1)))
    with pytest.raises(PromptError, match=str(model.config.vocab_size)):
        compute_chunks(model, [key], correction=made)
