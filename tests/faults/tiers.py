# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tiers and servers that fail, lie, hang or forget, and system calls that are refused."""

import errno
import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from hf_blend import plugins
from hf_blend.errors import StoreError
from hf_blend.store import ChunkKV, ChunkStore
from hf_blend.store.tiers.base import ObjectStat
from hf_blend.store.tiers.remote import RemoteTier

from .damage import clear, damaged
from .entries import asked
from .fault import FaultClass, Verdict
from .faulty_tier import FAULTS, FaultyTier
from .world import ModelCache, drawn_chunk

DURING = ("one bit of an answer", "zeros", "another object", "a short answer", "an error", "nothing in time")
AFTERWARDS = ("other bytes after the first reading", "gone after the first reading")


class FaultyServer(RemoteTier):
    """Objects by name."""

    def __init__(self, objects: dict[str, bytes], way: str = "", draw: random.Random | None = None) -> None:
        super().__init__("server")
        self.objects = objects
        self.way = way
        self.draw = draw or random.Random(0)
        self.sent = 0  # bytes of objects, since it was opened
        self._answers, self._fails_at = 0, self.draw.randrange(3)

    def ask_stat(self, name: str) -> ObjectStat | None:
        content = self.objects.get(name)
        if content is None or (self._is_over(content) and self.way.startswith("gone")):
            return None
        return ObjectStat(len(content), 0.0)

    def ask_bytes(self, name: str, start: int, stop: int) -> bytes:
        content = self.objects[name]
        is_over = self._is_over(content)
        answer = bytearray(content[start:stop])
        self.sent += len(answer)
        self._answers += 1
        if self.way in DURING and self._answers == self._fails_at + 1:
            return self._wrongly(name, answer, start, stop)
        if is_over and self.way in AFTERWARDS:
            return b"" if self.way.startswith("gone") else bytes(byte ^ 1 for byte in answer)
        return bytes(answer)

    def ask_put(self, name: str, content: bytes) -> None:
        self.objects[name] = content

    def ask_delete(self, name: str) -> bool:
        return self.objects.pop(name, None) is not None

    def ask_all(self) -> Mapping[str, ObjectStat]:
        return {name: ObjectStat(len(content), 0.0) for name, content in self.objects.items()}

    def _is_over(self, content: bytes) -> bool:
        return self.way in AFTERWARDS and self.sent >= len(content)

    def _wrongly(self, name: str, answer: bytearray, start: int, stop: int) -> bytes:
        if self.way == "an error":
            raise ConnectionResetError("the connection was reset")
        if self.way == "nothing in time":
            raise TimeoutError("no answer came")
        if self.way == "another object":
            other = self.draw.choice([one for one in self.objects if one != name])
            return self.objects[other][start:stop]
        if self.way == "a short answer":
            return bytes(answer[: self.draw.randrange(len(answer))])
        if self.way == "zeros":
            return bytes(len(answer))
        bit = self.draw.randrange(8 * len(answer))
        answer[bit // 8] ^= 1 << bit % 8
        return bytes(answer)


COSTLY = {"put.lost", "put.flip", "put.torn", "put.full", "open.other", "read.flip", "read.zero", "read.truncate"}
FAULTY_CHUNKS = 6


class FaultyTierFaults(FaultClass):
    """One run without what may cost an entry (lies, and a full device, which evicts), and one with all faults."""

    share = 0.03

    def inject(self, count: int) -> None:
        chunks = [drawn_chunk(number) for number in range(FAULTY_CHUNKS)]
        for honest in (True, False):
            rates = {fault: 0.04 for fault in FAULTS if not (honest and fault in COSTLY)}
            clear(self.folder)
            disk = plugins.load("store.tiers", "disk")(self.folder, durable=False)
            tier = FaultyTier(disk, self.random.randrange(1 << 30), rates)
            store = ChunkStore(None, [tier])
            acknowledged = set[int]()
            while tier.counts.total() < count / 2:
                before = tier.counts.copy()
                verdict = self._use(store, chunks, acknowledged)
                for fault, times in (tier.counts - before).items():
                    self.record(fault, verdict, count=times)
            if honest:
                tier.set_rates({})
                for number in acknowledged:
                    verdict = self.find(store, chunks[number])
                    if verdict is not Verdict.RIGHT:
                        self.note("afterwards", verdict, "acknowledged, and no fault may have cost it")

    def _use(self, store: ChunkStore, chunks: list[ChunkKV], acknowledged: set[int]) -> Verdict:
        number = self.random.randrange(FAULTY_CHUNKS)
        chunk = chunks[number]
        action = self.random.choice(("put", "put", "get", "get", "delete", "find", "contains"))
        if action == "put":
            before = store.stats()["stored"]
            store.put(chunk)
            if store.stats()["stored"] != before:
                acknowledged.add(number)
        elif action == "get":
            return self.expect(store, chunk)
        elif action == "delete":
            acknowledged.discard(number)
            try:
                store.delete(chunk.key)
            except StoreError:
                return Verdict.REFUSED
        elif action == "find":
            store.find(chunk.key.fingerprint, chunk.key.chunk_prefix_ids, chunk.key.token_ids)
        else:
            store.contains(chunk.key)
        return Verdict.MISS


ASKING = ("get", "stream", "stream in any order", "stream read ahead", "two streams")
HONEST = (AFTERWARDS[0], "an error", "nothing in time")  # no answer said that the object is damaged
REMOTE_SHELVES: dict[str, dict[str, Any]] = {"plain": {}, "int8": {"codec": "int8"}, "deep": {}}


class Remote(FaultClass):
    """Objects of the plain, the int8 and the deep shelf."""

    share = 0.07

    def setup(self) -> None:
        self._objects: dict[str, dict[str, bytes]] = {}
        self._names: dict[str, list[str]] = {}
        for name, settings in REMOTE_SHELVES.items():
            objects: dict[str, bytes] = {}
            store = ChunkStore(None, [FaultyServer(objects)], **settings)
            names = []
            for entry in self._shelf(name).entries:
                store.put(entry.computed)
                store.close()
                names += [one for one in objects if one not in names]
            self._objects[name] = objects
            self._names[name] = names
        self._disk = self.folder / "disk"

    def inject(self, count: int) -> None:
        for _ in range(count):
            name = self.random.choices(list(REMOTE_SHELVES), [3, 3, 2])[0]
            place = self.random.randrange(len(self._names[name]))
            way = self.random.choices(("", *DURING, *AFTERWARDS), [8, 4, 4, 4, 4, 4, 1, 4, 4])[0]
            asking = self.random.choice(ASKING)
            objects = dict(self._objects[name])
            kind = way
            object_name = self._names[name][place]
            if not way:
                other = objects[self._names[name][place - 1]]
                kind, objects[object_name] = damaged(self.random, objects[object_name], other)
            self.outcome.paths[name] += 1
            self.outcome.paths[asking] += 1
            server = FaultyServer(objects, way, self.random)
            self.judge(kind, lambda: self._ask(name, place, server, asking))  # noqa: B023
            _empty(self._disk)

    def _ask(self, name: str, place: int, server: FaultyServer, asking: str) -> Verdict:
        shelf = self._shelf(name)
        object_name = self._names[name][place]
        entry = shelf.entries[place]
        disk = plugins.load("store.tiers", "disk")(self._disk, durable=False)
        store = ChunkStore(None, [disk, server], **REMOTE_SHELVES[name])
        verdict = asked(shelf, entry, asking, self.random, store)
        store.close()
        if not _is_good(self._disk, shelf):
            return Verdict.WRONG  # what was copied is not what was verified
        if server.way in AFTERWARDS and verdict is Verdict.MISS and asking != "stream in any order":
            return Verdict.LOST  # all of it was read once, from the first byte to the last
        is_seen_damaged = server.way == AFTERWARDS[0] and asking == "two streams"  # the second one reads other bytes
        if server.way in HONEST and not is_seen_damaged and object_name not in server.objects:
            return Verdict.LOST
        return verdict

    def _shelf(self, name: str) -> ModelCache:
        return self.world.deep if name == "deep" else self.world.shelves[name]


def _is_good(disk: Path, shelf: ModelCache) -> bool:
    """Whether what lies on a disk is what the shelf has under the same name; an earlier request may be late."""
    good = {entry.path.name: entry.good for entry in shelf.entries}
    return all(path.read_bytes() == good[path.name] for path in (disk / "objects").rglob("*.safetensors"))


def _empty(disk: Path) -> None:
    for path in (disk / "objects").rglob("*.safetensors"):
        clear(path)


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.EACCES)
FAILING_CHUNKS = 20
CALLS = "open write fdatasync replace fsync mkdir lstat preadv unlink close utime".split()


class FailingCalls(FaultClass):
    """Each call in turn; with short writes every write of the entry takes only some bytes."""

    share = 0.03

    def setup(self) -> None:
        self._chunks = [drawn_chunk(number) for number in range(FAILING_CHUNKS)]

    def inject(self, count: int) -> None:
        store = ChunkStore.open(self.folder, memory_bytes=0, durability="full")
        for number in range(count):
            chunk = self.random.choice(self._chunks)
            if number % 4 == 0:
                self._shortly(store, chunk)
            elif number % 4 == 1:
                self._failing(store, chunk, partial(self.expect, store, chunk))
            else:
                self._failing(store, chunk, partial(store.put, chunk))
        self._look(store)
        store.close()

    def _shortly(self, store: ChunkStore, chunk: ChunkKV) -> None:
        real = os.write
        most = self.random.randint(200, 30_000)
        store.delete(chunk.key)
        with mock.patch.object(os, "write", lambda handle, data: real(handle, memoryview(data)[:most])):
            store.put(chunk)
        self.judge("short writes", lambda: self.find(store, chunk))

    def _failing(self, store: ChunkStore, chunk: ChunkKV, act: Callable[[], object]) -> None:
        call = self.random.choice(CALLS)
        number = self.random.choice(ERRORS)
        left = self.random.randrange(3)
        there = store.contains(chunk.key)
        real = getattr(os, call)

        def fail(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                if call == "close":
                    real(*args, **kwargs)
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        def look() -> Verdict:
            with mock.patch.object(os, call, fail):
                during = act()
            after = self.find(store, chunk) if there else self.expect(store, chunk)
            return Verdict.WRONG if during is Verdict.WRONG else after

        self.judge(call, look)
        if self.random.random() < 0.7:
            store.delete(chunk.key)

    def _look(self, store: ChunkStore) -> None:
        """Nothing half-written may be left, and what is listed must be whole."""
        self.note("left half-written", Verdict.LOST, count=len(list(self.folder.rglob("*.tmp"))))
        known = {chunk.key.digest: chunk for chunk in self._chunks}
        torn = [entry for entry in store.entries() if self.expect(store, known[entry.digest]) is not Verdict.RIGHT]
        self.note("listed, and not whole", Verdict.LOST, count=len(torn))
