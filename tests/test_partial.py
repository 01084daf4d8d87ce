# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading only important blocks: exact where all are loaded, verified where some are, and nothing unloaded is seen."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from hf_blend import BlendCache, observer, plugins
from hf_blend.model.anatomy import cache_among
from hf_blend.model.attention import ROWS
from hf_blend.model.capture import capture_chunk
from hf_blend.model.identity import fingerprint
from hf_blend.sparse.partial.blocked import BlockedChunk, BlockReader
from hf_blend.sparse.partial.loading import PartialLoading
from hf_blend.sparse.partial.reader import keep_in_blocks
from hf_blend.store import ChunkKey, ChunkKV, ChunkStore
from hf_blend.store.tiers.base import BytesSource, EntryFault
from tests.conftest import slow_but

CHUNKS = [list(range(10, 74)), list(range(40, 90)), list(range(20, 120, 2))]
PIECES: dict[str, Any] = {"prefix": [5, 6], "chunks": CHUNKS, "question": [7, 8, 9, 11]}
ANYHOW = 50.0  # an alpha at which heads agree whatever they say


class Watched(ChunkStore):
    """Keeps chunks in blocks alone, and remembers what was put."""

    def __init__(self, tier: Any) -> None:
        super().__init__([], [tier])
        self.put_keys: list[Any] = []
        self.blocks = keep_in_blocks(self, 8)

    def put(self, chunk: Any) -> Any:
        self.put_keys.append(chunk.key)
        return super().put(chunk)

    def opened(self) -> list[tuple[Any, Any]]:
        """Source and key of each chunk of `CHUNKS`."""
        keys = [key for key in self.put_keys if len(key.token_ids) > 40]
        return [(self.tiers[0].open(self.name(key.digest)), key) for key in keys]


def in_blocks(chunk: Any, order: Any, block_tokens: int = 8) -> bytes:
    return b"".join(BlockedChunk(chunk, "raw", list(order), block_tokens).parts)


def faults(store: Any) -> dict[str, int]:
    """Entries of the nearest tier that could not be used, by reason."""
    near = f"{store.tiers[0].name}:"
    failures = store.stats()["load_failures"]
    return {name.removeprefix(near): count for name, count in failures.items() if name.startswith(near)}


def random_chunk(tokens: int) -> ChunkKV:
    states = torch.randn(2, 2, 2, tokens, 4)
    key = ChunkKey("f" * 64, (), range(tokens))
    return ChunkKV(key, tuple(map(tuple, states)), (), (-1, -1))


MemoryTier = plugins.load("store.tiers", "memory")


@pytest.fixture(scope="module", params=slow_but("llama", among=["llama", "qwen3", "mistral"]))
def model(request):
    return tiny_model(request.param, **({"sliding_window": None} if request.param == "mistral" else {}))


def answered(model: Any, store: Any, share: float | None = None, how: Any = (), **settings: Any) -> Any:
    cache = BlendCache(model, store, **{"recompute_ratio": 0.0, "selector": "none", **settings})

    def generate() -> torch.Tensor:
        output = model.generate(
            **cache.inputs(None, **PIECES), past_key_values=cache, max_new_tokens=6, do_sample=False,
            eos_token_id=None, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return torch.stack(output.logits, 1)

    if share is None:
        return generate(), cache, None
    made: list[Any] = []
    store.part_loader = lambda one: made.append(PartialLoading(one, share, **dict(how))) or made[-1]
    try:
        return generate(), cache, made[0].report
    finally:
        store.part_loader = None


@pytest.fixture
def store(model):
    made = Watched(MemoryTier())
    answered(model, made)  # computes the chunks
    return made


RANDOM = {"recompute_ratio": 0.3, "selector": "random"}
DEVIATION = {"recompute_ratio": 0.2, "selector": "kv-deviation"}


@pytest.mark.parametrize("settings", [{}, RANDOM, DEVIATION])
def test_with_all_blocks_loaded_nothing_changes(model, store, settings):
    wanted, *_ = answered(model, store, **settings)
    got, _, report = answered(model, store, 1.0, **settings)
    torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6)
    assert report["unseen_share"] == 0


@pytest.mark.parametrize("settings", [{}, RANDOM])
@pytest.mark.parametrize("alpha", [0.0, 0.6, ANYHOW])
def test_what_is_not_loaded_is_as_if_masked_out(model, store, settings, alpha):
    """The reference: all KV is there, and a mask of each layer shuts the columns that were not loaded."""
    got, cache, report = answered(model, store, 0.3, {"alpha": alpha}, **settings)
    assert report["partial_layers"] + report["fallback_layers"] == len(cache.layers)
    assert 0 < report["loaded_bytes"] < report["all_bytes"] * 1.5
    hidden = []
    for layer in cache.layers:
        shut = torch.zeros(layer.length, dtype=torch.bool)
        if layer.visible is not None:
            shut[: layer.visible_tokens] = True
            shut[layer.visible] = False
            assert not shut[cache.report.chosen_columns[0]].any(), "what is computed is seen"
        hidden.append(shut)
    assert any(one.any() for one in hidden) or report["partial_layers"] == 0
    wanted = masked(model, store, hidden, settings)
    torch.testing.assert_close(got, wanted, rtol=0, atol=5e-6)


def masked(model: Any, store: Any, hidden: list[torch.Tensor], settings: Any) -> torch.Tensor:
    attentions = [layer.self_attn for layer in model.model.layers]

    def shut(index: int) -> Any:
        def before(module: Any, args: Any, kwargs: Any) -> Any:
            lines = kwargs.pop(ROWS, None)
            mask = kwargs["attention_mask"] if lines is None else lines.plain()
            rows = kwargs["hidden_states"].shape[1]
            keys = cache_among(kwargs).get_seq_length(index)
            if mask is None:
                mask = torch.ones(1, 1, rows, keys + rows, dtype=torch.bool)
            plain = mask.clone()
            plain[..., hidden[index][: plain.shape[-1]].nonzero()[:, 0]] = False
            return args, {**kwargs, "attention_mask": plain}

        return observer(before)  # a lie that hides columns as the reference does

    handles = [one.register_forward_pre_hook(shut(n), with_kwargs=True) for n, one in enumerate(attentions)]
    try:
        return answered(model, store, **settings)[0]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("part", [0, 1])
def test_flipped_bit_in_loaded_block_is_fault_and_in_another_is_not_read(model, store, part):
    source, key = store.opened()[0]
    reader = BlockReader(source, key)
    good = reader.read_blocks(1, part, [0], [0, 1, 3])
    block = reader.read_blocks(1, part, [0], [2]).numpy().tobytes()
    content = bytearray(source.content)
    content[content.index(block) + 5] ^= 1
    damaged = BlockReader(BytesSource(bytes(content)), key)
    assert torch.equal(damaged.read_blocks(1, part, [0], [0, 1, 3]), good)
    with pytest.raises(EntryFault, match="block 2 of layer 1, head 0"):
        damaged.read_blocks(1, part, [0], [1, 2])


def head_more(chunk):
    return chunk.map(lambda states: torch.cat([states, states[:1]]) if states.dim() == 3 else states)


def test_crafted_blocks_cost_request_time_and_nothing_else():
    """Of other layouts, see `test_hostile`."""
    model = tiny_model("llama")
    tier = MemoryTier()
    store = Watched(tier)
    wanted, *_ = answered(model, store)
    good = dict(tier.objects)
    for ids in CHUNKS:
        crafted = head_more(capture_chunk(model, ids, (1,), fingerprint(model)))
        tier.objects[store.name(crafted.key.digest)] = BytesSource(in_blocks(crafted, range(len(ids))))
    assert torch.equal(answered(model, store)[0], wanted)
    assert set(faults(store)) == {"layout"}
    assert tier.objects.keys() <= good.keys()
    assert torch.equal(answered(model, store)[0], wanted)


def test_blocks_of_other_tokens_are_refused_by_their_keys_at_layer_0():
    model = tiny_model("llama")
    tier = MemoryTier()
    store = Watched(tier)
    wanted, *_ = answered(model, store, 1.0, **DEVIATION)
    good = capture_chunk(model, CHUNKS[1], (1,), fingerprint(model))
    other = capture_chunk(model, CHUNKS[1][::-1], (1,), fingerprint(model))
    crafted = replace(other, key=good.key, canary=store.get(good.key).canary)
    tier.objects[store.name(good.key.digest)] = BytesSource(in_blocks(crafted, range(len(CHUNKS[1]))))
    got, cache, _ = answered(model, store, 1.0, **DEVIATION)
    assert cache.report.refused_chunks == 1
    assert not torch.equal(got, wanted), "it is computed in its place, by the prompt"


@given(st.integers(1, 40), st.integers(1, 12), st.randoms())
def test_chunk_comes_back_from_its_blocks_in_any_order(tokens, block, random):
    chunk = random_chunk(tokens)
    order = list(range(tokens))
    random.shuffle(order)
    reader = BlockReader(BytesSource(in_blocks(chunk, order, block)), chunk.key)
    found = reader.read().layers[1]
    count = random.randint(1, reader.blocks)
    blocks = sorted(random.sample(range(reader.blocks), count))
    tokens_of_blocks = reader.tokens_of(blocks)
    for part, states in enumerate(chunk.layers[1]):
        assert torch.equal(found[part], states)
        got = reader.read_blocks(1, part, [1, 0], blocks)
        assert torch.equal(got, states[[1, 0]][:, tokens_of_blocks])
