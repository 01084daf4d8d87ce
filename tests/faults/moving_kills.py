# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 while chunks move between tiers, are written in the background, or are written in a new order."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from hf_blend import plugins
from hf_blend.sparse.partial.store import DueOrder, PartialStore
from hf_blend.store import ChunkKV, ChunkStore

from .fault import Verdict
from .killing import CAP_CHUNKS, ENTRY_BYTES, Killing, read_numbers
from .world import drawn_chunk, is_same

CHUNKS = 40  # of one child
BLOCK_TOKENS = 8


class MovingKills(Killing):
    """The child acknowledges what it put, keeps moving it, and is killed a few milliseconds later."""

    def kill_one(self, capped: bool) -> list[int]:
        """Kill after some acknowledgements."""
        first = self.outcome.kills * 1000
        child, pipe = self.fork(lambda tell: self.use(first, tell))
        told = b"".join(os.read(pipe, 4) for _ in range(self.random.choice((1, 3, 8, 20))))
        time.sleep(self.random.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return [int.from_bytes(told[at : at + 4], "little") for at in range(0, len(told), 4)] + read_numbers(pipe)

    def use(self, first: int, tell: Callable[[int], None]) -> None:
        """What the child does until it is killed."""
        raise NotImplementedError


class Demotions(MovingKills):
    """Puts with background writes to a farther tier, and moves there and back: a chunk is in one tier, or in both."""

    kill_share = 0.07

    def opened(self, capped: bool) -> ChunkStore:
        """A store on disk with another folder as its remote tier."""
        far = f"file://{self.folder.parent}/{self.folder.name}-far"
        return ChunkStore.open(self.folder, remote=far, memory_bytes=0, disk_bytes=1 << 30)

    def use(self, first: int, tell: Callable[[int], None]) -> None:
        """Move every second chunk away, and every fourth back."""
        with self.opened(capped=False) as store:
            far = store.tiers()[-1].name
            for number in range(first + 1, first + CHUNKS):
                key = drawn_chunk(number).key
                store.put(drawn_chunk(number))
                tell(number)
                if number % 2:
                    store.move([key], far)
                if number % 4 == 1:
                    store.move([key], "disk")
            while True:  # there and back until the end
                for number in range(first + 1, first + CHUNKS):
                    store.move([drawn_chunk(number).key], ("disk", far)[number % 2])
                    store.move([drawn_chunk(number).key], (far, "disk")[number % 2])

    def check(self, acknowledged: list[int], capped: bool) -> None:
        """There is room for all: nothing may have been evicted."""
        super().check(acknowledged, capped=False)


class Placements(MovingKills):
    """Puts into a small disk before a large tier, which keep each chunk once: what is evicted and read moves."""

    kill_share = 0.07

    def opened(self, capped: bool) -> ChunkStore:
        """A store with room for a few chunks on disk, and another folder as its remote tier."""
        given: dict[str, Any] = {"memory_bytes": 0, "disk_bytes": CAP_CHUNKS * ENTRY_BYTES, "placement": "disk"}
        return ChunkStore.open(self.folder, remote=f"file://{self._far}", **given)

    @property
    def _far(self) -> Path:
        return self.folder.parent / f"{self.folder.name}-far"

    def use(self, first: int, tell: Callable[[int], None]) -> None:
        """Put, and read what moved away meanwhile."""
        draw = Random(first)
        with self.opened(capped=False) as store:
            for number in range(first + 1, first + CHUNKS):
                store.put(drawn_chunk(number))
                tell(number)
                store.get(drawn_chunk(draw.randint(first + 1, number)).key)
            while True:
                store.get(drawn_chunk(draw.randint(first + 1, first + CHUNKS - 1)).key)

    def check(self, acknowledged: list[int], capped: bool) -> None:
        """There is room for all, and once each was read it is in one tier."""
        super().check(acknowledged, capped=False)
        names = {drawn_chunk(number).key.digest for number in acknowledged}
        found = Counter(path.stem for root in (self.folder, self._far) for path in root.rglob("*.safetensors"))
        wrong = [name for name in names if found[name] != 1]
        self.note("not in one tier", Verdict.LOST, str(wrong[:2]), count=len(wrong))


class Reorders(MovingKills):
    """Chunks in blocks whose order is written again beside puts: each is there, in its old order or the new one."""

    kill_share = 0.1

    def use(self, first: int, tell: Callable[[int], None]) -> None:
        """Report importance that is drawn, so that every chunk is ordered again and again."""
        store = self._blocks()
        bits = torch.Generator().manual_seed(first)
        keys: list[Any] = []
        for number in range(first + 1, first + CHUNKS):
            store.put(drawn_chunk(number))
            tell(number)
            keys.append(drawn_chunk(number).key)
            for key in keys[-4:]:
                store.note(key, torch.rand(len(key.token_ids), generator=bits), 0.5)
                store.reordering.put(DueOrder(key))
        while True:
            store.reorder()
            for key in keys:
                store.note(key, torch.rand(len(key.token_ids), generator=bits), 0.5)

    def _blocks(self) -> PartialStore:
        tier = plugins.load("store.tiers", "disk")(self.folder / "blocks")
        return PartialStore([]).keep_blocks(tier, BLOCK_TOKENS)

    def check(self, acknowledged: list[int], capped: bool) -> None:
        """Look at the blocks, not at chunks that are whole."""
        super().check(acknowledged, capped=False)

    def _look(self, acknowledged: list[int], capped: bool) -> Verdict:
        store = self._blocks()
        store._tier.remove_orphans()
        verdicts = [self._found(store, drawn_chunk(number)) for number in acknowledged]
        left = list((self.folder / "blocks").rglob("*.tmp"))
        for verdict in (Verdict.WRONG, Verdict.LOST):
            if verdict in verdicts:
                return verdict
        return Verdict.LOST if left or store.faults else Verdict.RIGHT

    def _found(self, store: PartialStore, chunk: ChunkKV) -> Verdict:
        got = store.stream(chunk.key, lambda: chunk)
        if got is None:
            return Verdict.LOST
        whole = ChunkKV(got.key, tuple(got.layers), got.tables, got.layer_table)
        return Verdict.RIGHT if is_same(whole, chunk) else Verdict.WRONG
