# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of an entry is damaged, replaced or gone, also while it is read, and what was stored is asked for."""

import os
import random
from collections.abc import Callable

from hf_blend.store import ChunkStore

from .damage import NODES, clear, damaged
from .fault import FaultClass, Verdict, judged
from .world import WAYS, Entry, ModelCache, take


class Files(FaultClass):
    """Bits, blocks, cuts, mixtures of entries, spread evenly over the bytes; something else where the file was."""

    share = 0.7

    def inject(self, count: int) -> None:
        touched = {}
        for _ in range(count):
            name, shelf = self.world.shelf(self.random)
            place = self.random.randrange(len(shelf.entries))
            way = self.random.choice(WAYS)
            self.outcome.paths[way] += 1
            self.outcome.paths[name] += 1
            entry = shelf.entries[place]
            other = shelf.other(self.random, place)
            if self.random.random() < 0.06:
                kind = self.random.choice(list(NODES))
                clear(entry.path)
                NODES[kind](entry.path, other.path)
            else:
                kind, bad = damaged(self.random, entry.good, other.good)
                entry.path.write_bytes(bad)
            self.judge(kind, lambda: asked(shelf, entry, way, self.random))  # noqa: B023
            shelf.put_back(place)
            touched[name] = shelf
        for name, shelf in touched.items():
            verdict = asked(shelf, self.random.choice(shelf.entries), "get", self.random)
            if verdict is not Verdict.RIGHT:
                self.note("not damaged", Verdict.LOST if verdict is Verdict.MISS else verdict, name)


class Changing(FaultClass):
    """The file changes while its layers are read: its header was good."""

    share = 0.08

    def inject(self, count: int) -> None:
        changes: dict[str, Callable[[Entry, Entry], None]] = {
            "bytes": self._bytes,
            "cut": self._cut,
            "replaced": self._replaced,
            "removed": lambda entry, other: entry.path.unlink(),
        }
        for _ in range(count):
            name, shelf = self.world.shelf(self.random)
            place = self.random.randrange(len(shelf.entries))
            kind = self.random.choices(list(changes), [5, 2, 1, 1])[0]
            entry = shelf.entries[place]
            other = shelf.other(self.random, place)
            self.outcome.paths[name] += 1
            self.judge(kind, lambda: self._read(shelf, entry, lambda: changes[kind](entry, other)))  # noqa: B023
            shelf.put_back(place)

    def _read(self, shelf: ModelCache, entry: Entry, change: Callable[[], None]) -> Verdict:
        when = self.random.choice((0, 0, 1, 2))
        before = lambda number: change() if number == when else None  # noqa: E731
        got, computed = take(shelf.store, entry.computed, "stream in any order", self.random, before)
        return judged(got, computed, entry.expected) if got else Verdict.LOST

    def _bytes(self, entry: Entry, _: Entry) -> None:
        start = self.random.randrange(len(entry.good))
        with open(entry.path, "r+b") as file:
            file.seek(start)
            file.write(self.random.randbytes(self.random.choice((1, 1, 1, 64, 4096))))

    def _cut(self, entry: Entry, _: Entry) -> None:
        os.truncate(entry.path, self.random.randrange(len(entry.good)))

    def _replaced(self, entry: Entry, other: Entry) -> None:
        entry.path.unlink()
        entry.path.write_bytes(other.good)


def asked(shelf: ModelCache, entry: Entry, way: str, draw: random.Random, store: ChunkStore | None = None) -> Verdict:
    """Ask for an entry and compare it with the truth."""
    if way == "new process":  # and what it holds in memory from then on
        with shelf.opened(memory_bytes=1 << 26) as fresh:
            verdicts = [asked(shelf, entry, how, draw, fresh) for how in ("stream", "get")]
        return Verdict.WRONG if Verdict.WRONG in verdicts else verdicts[0]
    got, computed = take(store or shelf.store, entry.computed, way, draw)
    return judged(got, computed, entry.expected)
