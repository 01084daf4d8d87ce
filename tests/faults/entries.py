# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The file of an entry, or of the index, is damaged, replaced, forged or gone, and what was stored is asked for."""

import contextlib
import gc
import hashlib
import os
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache
from hf_blend.prompt.content import is_content
from hf_blend.store import ChunkKV, ChunkStore

from ..image_models import CHUNKS, FLOOR, arguments, build, gap, picture, stock
from .damage import NODES, body_of, clear, damaged, edited_header, header_of, tensors_of
from .fault import FaultClass, Verdict
from .world import NEIGHBOURS, WAYS, Entry, ModelCache, drawn_chunk, is_same, take


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


class Headers(FileFaults):
    """One value or name in the header is another, such as no program would write."""

    share = 0.04

    def one(self, shelf: ModelCache, place: int, way: str) -> None:
        entry = shelf.entries[place]
        bad = edited_header(self.random, entry.good)
        entry.path.write_bytes(bad)
        self.judge("edited", lambda: asked(shelf, entry, way, self.random))


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


PLACED_CHUNKS = 6


class Placed(FaultClass):
    """Each chunk is in one of two tiers; a process that was killed may have left it in both."""

    share = 0.01

    def setup(self) -> None:
        self._roots = [self.folder / "near", self.folder / "far"]
        self._chunks = [drawn_chunk(number) for number in range(PLACED_CHUNKS)]
        self._good: list[tuple[Path, bytes]] = []
        self._stores = {placement: self._opened(placement) for placement in ("disk", "remote")}
        for chunk in self._chunks:
            self._stores["disk"].put(chunk)
            self._stores["disk"].flush()
            (path,) = (self._roots[0] / "objects").rglob("*.safetensors")
            self._good.append((path.relative_to(self._roots[0]), path.read_bytes()))
            clear(path)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def inject(self, count: int) -> None:
        for _ in range(count):
            number, placement = self.random.randrange(PLACED_CHUNKS), self.random.choice(list(self._stores))
            here = self.random.randrange(2)
            is_twice = self.random.random() < 0.5
            (name, good), (_, other) = self._good[number], self._good[number - 1]
            kind = self._damage(self._roots[here] / name, good, other)
            if is_twice:
                self._write(self._roots[1 - here] / name, good)
            self.outcome.paths["beside a whole one" if is_twice else "alone"] += 1
            self.outcome.paths[f"placement {placement}"] += 1
            chunk = self._chunks[number]
            self.judge(kind, lambda: self._asked(placement, chunk, is_twice))  # noqa: B023
            self._stores[placement].flush()
            for root in self._roots:
                clear(root / name)

    def _asked(self, placement: str, chunk: ChunkKV, is_twice: bool) -> Verdict:
        """What is whole in one tier is found: at once, or by the next process, which knows of no slow tier."""
        verdict = self.expect(self._stores[placement], chunk)
        if verdict is Verdict.MISS and is_twice:
            with self._opened(placement) as fresh:
                got = self.find(fresh, chunk)
            return verdict if got is Verdict.RIGHT else got
        return verdict

    def _damage(self, path: Path, good: bytes, other: bytes) -> str:
        """Put something else in the place of a file, and say what."""
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(path)
        if self.random.random() < 0.1:
            kind = self.random.choice(("gone", "directory", "link to nothing", "link to itself"))
            NODES[kind](path, path)
            return kind
        kind, bad = damaged(self.random, good, other)
        path.write_bytes(bad)
        return kind

    def _opened(self, placement: str) -> ChunkStore:
        near, far = self._roots
        given = {"memory_bytes": 0, "durability": "none", "remote_queue_bytes": 0}
        return ChunkStore.open(near, remote=f"file://{far}", placement=placement, **given)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(path)
        path.write_bytes(content)


KIND = "llava"
SEEDS = range(4)  # of the images


class ImageChunks(Files):
    """Images of one size, so that each could be taken for another."""

    share = 0.01

    def drawn(self) -> tuple[str, ModelCache]:
        return "images", self._shelf

    @cached_property
    def _shelf(self) -> ModelCache:
        """The chunks of the images alone; what is blended from them is what the stock model computes."""
        folder, settings = self.folder / "images", {"memory_bytes": 0}
        shelf = ModelCache(folder, settings, ChunkStore.open(folder, durability="none", **settings))
        kept, put = list[ChunkKV](), shelf.store.put
        vars(shelf.store)["put"] = lambda chunk: (kept.append(chunk), put(chunk))[1]
        for seed in SEEDS:
            self._request(shelf.store, seed)
        del vars(shelf.store)["put"]
        for chunk in kept:
            if is_content(chunk.key.token_ids[0]):
                (path,) = (folder / "objects").rglob(f"*{chunk.key.digest}*")
                got = shelf.store.get(chunk.key)
                assert got is not None, "nothing was damaged yet, and nothing was found"
                entry = Entry(chunk, got, path, path.read_bytes())
                shelf.entries.append(entry)
        assert len(shelf.entries) >= len(SEEDS), "an image has an entry of its features and one of its K and V"
        for path in (folder / "incoming").glob("*"):
            clear(path)
        return shelf

    @torch.no_grad()
    def _request(self, store: ChunkStore, seed: int) -> None:
        inputs, model = arguments(KIND, CHUNKS[0], picture(KIND), CHUNKS[1], seeds=(seed,)), build(KIND)
        cache = BlendCache(model, store, recompute_ratio=1.0)
        given: Any = cache.inputs_with_images(**inputs)
        got = model(**given, past_key_values=cache, logits_to_keep=1, use_cache=True).logits[:, -1]
        assert gap(got, stock(KIND, inputs)[0]) < FLOOR, "not what the stock model computes"


INDEXED_CHUNKS = 5


class IndexDamage(FaultClass):
    """Every way of damage in every file of the index, hostile values in it, and no index at all."""

    share = 0.01

    def setup(self) -> None:
        self._chunks = [drawn_chunk(number) for number in range(INDEXED_CHUNKS)]
        with self._opened() as store:
            for chunk in self._chunks:
                store.put(chunk)
        with self._opened() as store:
            for chunk in self._chunks:
                store.get(chunk.key)
        self._good = {
            path: path.read_bytes() for path in sorted((self.folder / "index").iterdir()) if path.stat().st_size
        }

    def inject(self, count: int) -> None:
        for _ in range(count):
            path = self.random.choice(list(self._good))
            good = self._good[path]
            drawn = self.random.random()
            if drawn < 0.1:
                kind = "gone"
                path.unlink()
            elif drawn < 0.5 and path.suffix == ".sqlite":
                kind = "another value in a row"
                self._edit(path)
            else:
                kind, bad = damaged(self.random, good, self.random.randbytes(len(good)))
                path.write_bytes(bad)
            self.judge(f"{path.suffix}: {kind}", self._look)
            for one, content in self._good.items():
                one.write_bytes(content)

    def _edit(self, path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db, db:
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            table = self.random.choice([name for name in tables if not name.startswith("sqlite_")])
            column = self.random.choice([row[1] for row in db.execute(f"PRAGMA table_info({table})")])
            value = self.random.choice([None, -1, 1 << 62, 2.5, "x", b"\xff", self.random.randbytes(32)])
            with contextlib.suppress(sqlite3.IntegrityError):
                db.execute(f"UPDATE {table} SET {column} = ? WHERE random() % 2", (value,))

    def _look(self) -> Verdict:
        with self._opened() as store:
            store.find(
                self._chunks[0].key.fingerprint, self._chunks[0].key.chunk_prefix_ids, self._chunks[0].key.token_ids
            )
            if len(store) != INDEXED_CHUNKS or len(list(store.entries())) != INDEXED_CHUNKS:
                return Verdict.LOST
            store.put(self._chunks[0])
            verdicts = [self.find(store, chunk) for chunk in self._chunks]
        return next((verdict for verdict in verdicts if verdict is not Verdict.RIGHT), Verdict.RIGHT)

    def _opened(self) -> ChunkStore:
        return ChunkStore.open(Path(self.folder), memory_bytes=0, durability="none")
