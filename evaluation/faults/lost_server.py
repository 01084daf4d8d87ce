# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier on another machine whose server is gone, hangs, forgets, or sends other bytes than it was asked for."""

import time
from collections.abc import Mapping, Sequence

from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import ObjectStat
from hf_blend.store.tiers.remote import Found, RemoteTier

from .base import FaultClass, tiny_chunk

WAYS = ("gone", "hangs", "forgets", "short", "other")
HARMLESS = ("gone", "hangs")  # what was stored before is there afterwards
CHUNKS = 6
OPERATIONS = 12
HURRY_S, PATIENCE_S = 0.005, 60.0


class _Server(RemoteTier):
    """A server in this process, with the deadlines and the circuit of the real ones."""

    def __init__(self, objects: dict[str, bytes], way: str = "") -> None:
        super().__init__("server", HURRY_S if way == "hangs" else PATIENCE_S)
        self._objects, self._way = objects, way

    def ask_ping(self) -> object:
        return self._ask()

    def ask_stat(self, name: str) -> Found | None:
        content = self._ask().get(name)
        return None if content is None else Found(ObjectStat(len(content), 0.0), hash(content))

    def ask_bytes(self, name: str, found: Found, start: int, stop: int) -> bytes:
        objects = self._ask()
        if self._way == "other":
            name = max(other for other in objects if other != name or len(objects) == 1)
        return objects.get(name, b"")[start : stop - (self._way == "short")]

    def ask_put(self, name: str, content: bytes) -> bool:
        objects = self._ask()
        return name not in objects and objects.setdefault(name, content) is content

    def ask_delete(self, name: str, identity: object) -> bool:
        return self._ask().pop(name, None) is not None

    def ask_names(self, space: str) -> Sequence[str]:
        return [name for name in self._ask() if name.startswith(space)]

    def ask_all(self) -> Mapping[str, ObjectStat]:
        return {name: ObjectStat(len(content), 0.0) for name, content in self._ask().items()}

    def _ask(self) -> dict[str, bytes]:
        if self._way == "gone":
            raise ConnectionRefusedError("nobody listens")
        if self._way == "hangs":
            time.sleep(4 * HURRY_S)
        if self._way == "forgets":
            self._objects.clear()
        return self._objects


class LostServer(FaultClass):
    """Every use of the store while the server is lost counts as one fault."""

    share = 0.04

    def inject(self, count: int) -> None:
        """Store while all is well, use while it is not, and look afterwards."""
        chunks = [tiny_chunk(number) for number in range(CHUNKS)]
        for number in range(-(-count // OPERATIONS)):
            way, objects = WAYS[number % len(WAYS)], dict[str, bytes]()
            with ChunkStore([], [_Server(objects)]) as before:
                for chunk in chunks[1:]:
                    before.put(chunk)
            lost = ChunkStore([], [_Server(objects, way)])
            for _ in range(OPERATIONS):
                chunk = self.random.choice(chunks)
                if self.random.random() < 0.3:
                    lost.put(chunk)
                else:
                    self.expect(lost, chunk)
                self.hit(way)
            lost.close()
            if way in HARMLESS:
                after = ChunkStore([], [_Server(objects)])
                self.outcome.lost += sum(not self.expect(after, chunk) for chunk in chunks[1:])
