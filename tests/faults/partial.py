# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of an entry in blocks is damaged, before it is opened or while it is read, whole or in part."""

import gc
from pathlib import Path
from typing import Any

import torch

from hf_blend import plugins
from hf_blend.sparse.partial.store import PartialStore
from hf_blend.store import ChunkKV, ChunkStore

from .damage import clear, damaged
from .fault import FaultClass, Verdict
from .oracle import is_equal
from .world import Entry

BLOCK_TOKENS = 8


class Partial(FaultClass):
    """Blocks in the order of an importance that is drawn."""

    share = 0.07

    def setup(self) -> None:
        """Put the chunks of the plain shelf into blocks."""
        tier = plugins.load("store.tiers", "disk")(self.folder / "blocks", durable=False)
        self._store = PartialStore(ChunkStore.open("memory://"), tier, BLOCK_TOKENS)
        self._files: list[tuple[Entry, Path, bytes]] = []
        known: set[Path] = set()
        for entry in self.world.shelves["plain"].entries:
            order = torch.rand(entry.computed.tokens, generator=torch.Generator().manual_seed(0))
            self._store.note(entry.key, order, 0.5)
            self._store.put(entry.computed)
            (path,) = {one for one in (self.folder / "blocks").rglob("*") if one.is_file()} - known
            known.add(path)
            self._files.append((entry, path, path.read_bytes()))

    def inject(self, count: int) -> None:
        """Damage, read, and put back."""
        for _ in range(count):
            place = self.random.randrange(len(self._files))
            entry, path, good = self._files[place]
            kind, bad = damaged(self.random, good, self._files[place ^ 1][2])
            reading, meanwhile = self.random.choice(("whole layers", "some blocks")), self.random.random() < 0.4
            self.outcome.paths[reading] += 1
            self.outcome.paths["while it is read" if meanwhile else "before it is opened"] += 1
            if not meanwhile:
                path.write_bytes(bad)
            self.judge(kind, lambda: self._read(entry, path, bad if meanwhile else None, reading))  # noqa: B023
            clear(path)
            path.write_bytes(good)
            gc.collect()

    def _read(self, entry: Entry, path: Path, bad: bytes | None, reading: str) -> Verdict:
        computed: list[int] = []

        def recompute() -> ChunkKV:
            computed.append(1)
            return entry.computed

        chunk = self._store.stream(entry.key, recompute)
        if chunk is None:
            return Verdict.MISS if bad is None else Verdict.LOST
        if bad is not None:
            path.write_bytes(bad)
        is_right = [is_equal(*pair) for pair in zip(chunk.tables[0], entry.expected.tables[0], strict=True)]
        places = list(range(len(chunk.layers)))
        self.random.shuffle(places)
        for place in places:
            expected = entry.expected.layers[place]
            if reading == "whole layers":
                is_right += [is_equal(*pair) for pair in zip(chunk.layers[place], expected, strict=True)]
            else:
                is_right.append(self._some_blocks(chunk.layers, place, expected))
        if not all(is_right) or chunk.layer_table != entry.expected.layer_table:
            return Verdict.WRONG
        return Verdict.MISS if computed else Verdict.RIGHT

    def _some_blocks(self, layers: Any, place: int, expected: tuple[torch.Tensor, ...]) -> bool:
        part, reader = self.random.randrange(2), layers.reader
        blocks = sorted(self.random.sample(range(reader.blocks), self.random.randint(1, reader.blocks)))
        heads = self.random.sample(range(reader.heads), self.random.randint(1, reader.heads))
        got, all_of = layers.part(place, part, heads, blocks), expected[part][heads]
        return is_equal(got, all_of if len(blocks) == reader.blocks else all_of[:, reader.tokens_of(blocks)])
