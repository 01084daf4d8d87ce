# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is damaged: stores of real entries, in files, of models of transformers with four layers and with twelve.

Everything that a store hands out is compared with `oracle`, which shares no code with it. Where a codec rounds, what
came out of the undamaged store is held against the truth once, within the step of the codec, and from then on bit for
bit against itself. So it is with links of chains, which healing computes in blocks of its own.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache
from hf_blend.prefill.pipeline import Pipeline
from hf_blend.store import ChunkKey, ChunkKV, ChunkStore
from hf_blend.store.chunk import CHAIN
from hf_blend.store.stream import StreamedLayers
from tests.conftest import build_tiny_model

from .damage import clear
from .oracle import Truth, is_equal, stock_kv

LENGTHS = (16, 16, 40, 40, 64, 64)  # two of each, so that entries of equal length can change places
DEEP_LENGTHS = (48, 64, 64)
SINK = (1,)
SHELVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"codec": "int8"},
}
WAYS = ("get", "stream", "stream in any order", "stream read ahead", "two streams", "new process")
DEEP = {"hidden_size": 256, "num_hidden_layers": 12, "num_key_value_heads": 4}  # 1.6 MB an entry


@dataclass(frozen=True)
class Entry:
    """One stored chunk."""

    computed: ChunkKV
    expected: ChunkKV
    path: Path
    good: bytes

    @property
    def key(self) -> ChunkKey:
        """Of the chunk."""
        return self.expected.key


@dataclass
class ModelCache:
    """A store in a folder, all of whose entries are known."""

    folder: Path
    settings: dict[str, Any]
    store: ChunkStore
    entries: list[Entry] = field(default_factory=list)

    def opened(self, **settings: Any) -> ChunkStore:
        """The same folder, as another process would open it."""
        return ChunkStore.open(self.folder, durability="none", **{**self.settings, **settings})

    def put_back(self, place: int) -> None:
        """Make an entry's file good again, whatever stands there now."""
        entry = self.entries[place]
        clear(entry.path)
        entry.path.write_bytes(entry.good)

    def other(self, draw: random.Random, place: int) -> Entry:
        """Another entry; one of the same length, if there is one."""
        length = self.entries[place].expected.tokens
        others = [entry for number, entry in enumerate(self.entries) if number != place]
        return draw.choice([entry for entry in others if entry.expected.tokens == length] or others)


class World:
    """All that is built once."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.model = build_tiny_model(attention_dropout=0.5)
        draw = random.Random(0)
        self.chunks = [tuple(draw.randrange(3, 128) for _ in range(length)) for length in LENGTHS]
        truths = {ids: stock_kv(self.model, SINK, ids) for ids in self.chunks}
        self.shelves = {name: self._filled(name, self.model, truths, given) for name, given in SHELVES.items()}
        self.shelves["chains"] = self._chains()

    @cached_property
    def deep(self) -> ModelCache:
        """Entries that are larger than what is read at once."""
        model = build_tiny_model(seed=2, attention_dropout=0.5, **DEEP)
        draw = random.Random(1)
        chunks = [tuple(draw.randrange(3, 128) for _ in range(length)) for length in DEEP_LENGTHS]
        return self._filled("deep", model, {ids: stock_kv(model, SINK, ids) for ids in chunks}, {})

    def shelf(self, draw: random.Random) -> tuple[str, ModelCache]:
        """One of all, with its name."""
        name = draw.choices(["plain", "int8", "chains", "deep"], [10, 5, 5, 3])[0]
        return name, self.deep if name == "deep" else self.shelves[name]

    def _chains(self) -> ModelCache:
        """Links of two chains that begin alike, as healing stores them."""
        folder = self.folder / "chains"
        settings = {"memory_bytes": 0}
        shelf = ModelCache(folder, settings, ChunkStore.open(folder, durability="none", **settings))
        for chunks in (self.chunks[:4], [*self.chunks[:2], *self.chunks[4:]]):
            cache = BlendCache(self.model, shelf.store, chains=True)
            ids = cache.inputs(None, prefix=[1, 3, 4], chunks=[list(ids) for ids in chunks], question=[80, 81, 82])
            self.model(**ids, past_key_values=cache, logits_to_keep=1)
            cache.heal()
        for digest in shelf.store.index.digests():
            listed = shelf.store.index.get(digest)
            if listed is None or not listed[0].fingerprint.endswith(CHAIN):
                continue
            got = shelf.store.get(listed[0])
            assert got is not None
            truth = stock_kv(self.model, got.key.chunk_prefix_ids, got.key.token_ids)
            for mine, theirs in zip((*got.layers, *got.tables), (*truth.layers, truth.table), strict=True):
                torch.testing.assert_close(mine, theirs)
            (path,) = (folder / "objects").rglob(f"*{digest}*.safetensors")
            shelf.entries.append(Entry(got, replace(got, layers=tuple(got.layers)), path, path.read_bytes()))
        return shelf

    def _filled(
        self, name: str, model: Any, truths: dict[tuple[int, ...], Truth], settings: dict[str, Any]
    ) -> ModelCache:
        folder = self.folder / name
        shelf = ModelCache(folder, settings, ChunkStore.open(folder, durability="none", memory_bytes=0, **settings))
        shelf.settings = {**settings, "memory_bytes": 0}
        known: set[Path] = set()
        for ids, truth in truths.items():
            (key,) = shelf.store.add(model, None, [ids], chunk_prefix_ids=SINK)
            (path,) = set((folder / "objects").rglob("*.safetensors")) - known
            known.add(path)
            got = shelf.store.get(key)
            assert got is not None, "nothing was damaged yet, and nothing was found"
            true = {"layers": truth.layers, "tables": (truth.table,), "layer_table": (0,) * len(truth.layers)}
            computed = replace(got, **true)
            if settings.get("codec") == "int8":
                assert _is_rounded(got, computed), "an int8 entry is not the truth to the next step"
            else:
                assert is_same(got, computed), "an entry is not what stock transformers computes"
            shelf.entries.append(Entry(computed, replace(got, layers=tuple(got.layers)), path, path.read_bytes()))
        return shelf


def take(
    store: ChunkStore, true: ChunkKV, way: str, draw: random.Random, before: Callable[[int], None] = lambda _: None
) -> tuple[list[ChunkKV], bool]:
    """Ask for a chunk as requests do, and use every layer of it; gives what came, and whether it was computed.

    `before` is called with how many layers of it were used.
    """
    computed: list[int] = []

    def recompute() -> ChunkKV:
        computed.append(1)
        return store.put(true)

    if way == "get":
        whole = store.get(true.key)
        return ([] if whole is None else [whole]), False
    streams = [store.stream(true.key) for _ in range(2 if way == "two streams" else 1)]
    chunks = [chunk for chunk in streams if chunk is not None]
    coming = [chunk.layers for chunk in chunks if isinstance(chunk.layers, StreamedLayers)]
    for layers in coming:
        layers.recompute = recompute
    reading = [Pipeline([layers]) for layers in coming if way == "stream read ahead"]
    orders = [list(range(len(chunk.layers))) for chunk in chunks]
    if way == "stream in any order":
        for order in orders:
            draw.shuffle(order)
    found: list[dict[int, Any]] = [{} for _ in chunks]
    for number, places in enumerate(zip(*orders, strict=False)):
        before(number)
        for chunk, place, layers in zip(chunks, places, found, strict=True):
            streamed = isinstance(chunk.layers, StreamedLayers)
            layers[place] = chunk.layers.load(place) if streamed else chunk.layers[place]
    for one in reading:
        one.close()
    got = [replace(c, layers=tuple(has[n] for n in sorted(has))) for c, has in zip(chunks, found, strict=True)]
    return got, bool(computed)


def is_same(got: ChunkKV, expected: ChunkKV) -> bool:
    """Compare bit for bit."""
    if got.key != expected.key or got.layer_table != expected.layer_table:
        return False
    if len(got.layers) != len(expected.layers) or len(got.tables) != len(expected.tables):
        return False
    pairs = zip((*got.layers, *got.tables), (*expected.layers, *expected.tables), strict=True)
    return all(is_equal(one, other) for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True))


def _is_rounded(got: ChunkKV, computed: ChunkKV) -> bool:
    """K within half a step of each channel's largest value, V within half a step of each token's."""
    for mine, theirs in zip(got.layers, computed.layers, strict=True):
        for one, other, axis in zip(mine, theirs, (1, 2), strict=True):
            step = other.abs().amax(dim=axis, keepdim=True) / 127
            if one.shape != other.shape or bool(((one - other).abs() > 0.5001 * step + 1e-7).any()):
                return False
    return True


def drawn_chunk(number: int, fingerprint: str = "ab" * 32) -> ChunkKV:
    """A chunk of four layers and 16 to 40 tokens, of bits that are drawn: for what needs thousands of chunks."""
    bits = torch.Generator().manual_seed(number)
    tokens = (16, 24, 40)[number % 3]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=bits)

    key = ChunkKey(fingerprint, SINK, (5, number, *range(tokens - 2)))
    layers = tuple((normal(2, tokens, 16), normal(2, tokens, 16)) for _ in range(4))
    return ChunkKV(key, layers, ((normal(tokens, 16), normal(tokens, 16)),), (0,) * 4)
