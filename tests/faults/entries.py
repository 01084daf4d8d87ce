# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of an entry is damaged, replaced, forged or gone, and what was stored is asked for."""

import gc
import hashlib
import os
import random
from collections.abc import Callable
from dataclasses import replace

from hf_blend.store import ChunkKV, ChunkStore

from .damage import NODES, body_of, clear, damaged, header_of, tensors_of
from .fault import FaultClass, Verdict
from .world import NEIGHBOURS, WAYS, Entry, ModelCache, is_same, take


class FileFaults(FaultClass):
    """Damages one file of a shelf, asks, and puts the file back."""

    def inject(self, count: int) -> None:
        touched = {}
        for _ in range(count):
            name, shelf = self.drawn()
            place, way = self.random.randrange(len(shelf.entries)), self.random.choice(WAYS)
            self.outcome.paths[way] += 1
            self.outcome.paths[name] += 1
            self.one(shelf, place, way)
            shelf.put_back(place)
            touched[name] = shelf
        for name, shelf in touched.items():
            verdict = asked(shelf, self.random.choice(shelf.entries), "get", self.random)
            if verdict is not Verdict.RIGHT:
                self.note("not damaged", Verdict.LOST if verdict is Verdict.MISS else verdict, name)

    def drawn(self) -> tuple[str, ModelCache]:
        """The shelf of the next fault, with its name."""
        return self.world.shelf(self.random)

    def one(self, shelf: ModelCache, place: int, way: str) -> None:
        """Inject one fault."""
        raise NotImplementedError


class Files(FileFaults):
    """Bits, blocks, cuts, mixtures of entries, spread evenly over the bytes; something else where the file was."""

    share = 0.45

    def one(self, shelf: ModelCache, place: int, way: str) -> None:
        entry, other = shelf.entries[place], shelf.other(self.random, place)
        if self.random.random() < 0.06:
            kind = self.random.choice(list(NODES))
            clear(entry.path)
            NODES[kind](entry.path, other.path)
        else:
            kind, bad = damaged(self.random, entry.good, other.good)
            entry.path.write_bytes(bad)
        self.judge(kind, lambda: asked(shelf, entry, way, self.random))


class Planted(FileFaults):
    """A whole and valid entry of another model, sink, tenant or text, under the name of the one that is asked for."""

    share = 0.05

    def one(self, shelf: ModelCache, place: int, way: str) -> None:
        kind, entry, name = self.random.choice(NEIGHBOURS), shelf.entries[place], shelf.folder.name
        if name == "deep":
            kind = "another entry"
        bad = shelf.other(self.random, place).good if name == "deep" else self.world.neighbour(name, place, kind)
        entry.path.write_bytes(bad)
        self.judge(kind, lambda: asked(shelf, entry, way, self.random))


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
            entry, other = shelf.entries[place], shelf.other(self.random, place)
            self.outcome.paths[name] += 1
            self.judge(kind, lambda: self._read(shelf, entry, lambda: changes[kind](entry, other)))  # noqa: B023
            shelf.put_back(place)

    def _read(self, shelf: ModelCache, entry: Entry, change: Callable[[], None]) -> Verdict:
        computed: list[int] = []

        def recompute() -> ChunkKV:
            computed.append(1)
            return entry.computed

        chunk = shelf.store.stream(entry.key, recompute)
        if chunk is None:
            return Verdict.LOST
        order, found = list(range(len(chunk.layers))), {}
        self.random.shuffle(order)
        when = self.random.choice((0, 0, 1, 2))
        for number, place in enumerate(order):
            if number == when:
                change()
            found[place] = chunk.layers[place]
        expected = entry.expected.layers
        got = type(chunk)(chunk.key, tuple(found[n] for n in sorted(found)), chunk.tables, chunk.layer_table)
        if len(found) != len(expected) or not is_same(got, entry.expected):
            return Verdict.WRONG
        return Verdict.MISS if computed else Verdict.RIGHT

    def _bytes(self, entry: Entry, other: Entry) -> None:
        del other
        start = self.random.randrange(len(entry.good))
        with open(entry.path, "r+b") as file:
            file.seek(start)
            file.write(self.random.randbytes(self.random.choice((1, 1, 1, 64, 4096))))

    def _cut(self, entry: Entry, other: Entry) -> None:
        del other
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
    try:
        got, computed = take(store or shelf.store, entry, way, draw)
    finally:
        gc.collect()  # a fault holds the chunk that met it, and whoever asks meanwhile is given the same chunk
    if not all(is_same(one, entry.expected) for one in got):
        return Verdict.WRONG
    return Verdict.MISS if computed or not got else Verdict.RIGHT


ATTACKER = b"x"
SIGNED_SHELVES = ("signed", "signed int8")
FORGERIES = ("unsigned", "other secret", "relabelled", "digests mended", "signature of another")


class Signed(FileFaults):
    """Entries under the right key, whole in themselves, with KV of the attacker's choice."""

    share = 0.06

    def setup(self) -> None:
        self._forged: dict[tuple[str, int], dict[str, bytes]] = {}

    def drawn(self) -> tuple[str, ModelCache]:
        name = self.random.choice(SIGNED_SHELVES)
        return name, self.world.shelves[name]

    def one(self, shelf: ModelCache, place: int, way: str) -> None:
        name, kind, entry = shelf.folder.name, self.random.choice(FORGERIES), shelf.entries[place]
        if (name, place) not in self._forged:
            self._forged[name, place] = self._forgeries(name, entry)
        entry.path.write_bytes(self._mended(entry) if kind == "digests mended" else self._forged[name, place][kind])
        self.judge(kind, lambda: asked(shelf, entry, way, self.random))

    def _forgeries(self, name: str, entry: Entry) -> dict[str, bytes]:
        turned = tuple((-keys, values.flip(1)) for keys, values in entry.computed.layers)
        evil = replace(entry.computed, layers=turned)
        unsigned, other = (self.world.written(name, evil, secret=secret) for secret in (None, ATTACKER))
        header, body = (part(unsigned) for part in (header_of, body_of))
        relabelled = header.replace(b"sha256:", b"hmac-sha256:").rstrip(b" ")
        relabelled += b" " * (-(8 + len(relabelled)) % 64)
        return {
            "unsigned": unsigned,
            "other secret": other,
            "relabelled": len(relabelled).to_bytes(8, "little") + relabelled + body,
            "signature of another": entry.good[: -len(body_of(entry.good))] + body_of(other),
        }

    def _mended(self, entry: Entry) -> bytes:
        """Another value in one tensor, with the digest that then is right; the signature stays as it was."""
        bad, digest = bytearray(entry.good), lambda content: hashlib.sha256(content).hexdigest().encode()
        start, stop = self.random.choice([one for name, one in tensors_of(entry.good).items() if "layer" in name])
        before = digest(bad[start:stop])
        bad[self.random.randrange(start, stop)] ^= 0x40
        assert entry.good.count(before) == 1, "a signed entry holds the sha256 of each tensor once"
        return bytes(bad).replace(before, digest(bad[start:stop]))
