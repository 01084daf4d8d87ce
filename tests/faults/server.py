# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A server in this process, with the deadlines and the circuit of the real ones, that goes wrong while it is read."""

import random
import time
from collections.abc import Mapping, Sequence

from hf_blend.store.tiers.base import ObjectStat
from hf_blend.store.tiers.remote import Found, RemoteTier

__all__ = ["AFTERWARDS", "DURING", "HURRY_S", "LOST", "FaultyServer"]

DURING = ("one bit of an answer", "zeros", "another object", "a short answer", "an error", "nothing in time")
AFTERWARDS = ("other bytes after the first reading", "gone after the first reading")
LOST = ("gone", "hangs", "forgets")
HURRY_S, PATIENCE_S = 0.005, 60.0


class FaultyServer(RemoteTier):
    """Objects by name.

    Args:
        objects: what it holds.
        way: what goes wrong while an object is read, one of `DURING` or `AFTERWARDS`, or always, one of `LOST`; "" for
            nothing.
        draw: when, and where.
    """

    def __init__(self, objects: dict[str, bytes], way: str = "", draw: random.Random | None = None) -> None:
        super().__init__("server", HURRY_S if way in ("hangs", "nothing in time") else PATIENCE_S)
        self.objects, self.way, self.draw = objects, way, draw or random.Random(0)
        self.sent = 0  # bytes of objects, since it was opened
        self._answers, self._fails_at = 0, self.draw.randrange(3)

    def ask_ping(self) -> object:
        return self._ask()

    def ask_stat(self, name: str) -> Found | None:
        content = self._ask().get(name)
        if content is None or self._is_over(content):
            return None if content is None or self.way.startswith("gone") else self._found(content)
        return self._found(content)

    def ask_bytes(self, name: str, found: Found, start: int, stop: int) -> bytes:
        content = self._ask()[name]
        is_over = self._is_over(content)
        answer = bytearray(content[start:stop])
        self.sent += len(answer)
        self._answers += 1
        if self.way in DURING and self._answers == self._fails_at + 1:
            return self._wrongly(name, answer, start, stop)
        if is_over and self.way in AFTERWARDS:
            return b"" if self.way.startswith("gone") else bytes(byte ^ 1 for byte in answer)
        return bytes(answer)

    def ask_put(self, name: str, content: bytes) -> bool:
        objects = self._ask()
        return name not in objects and objects.setdefault(name, content) is content

    def ask_delete(self, name: str, identity: object) -> bool:
        return self._ask().pop(name, None) is not None

    def ask_names(self, space: str) -> Sequence[str]:
        return [name for name in self._ask() if name.startswith(space)]

    def ask_all(self) -> Mapping[str, ObjectStat]:
        return {name: ObjectStat(len(content), 0.0) for name, content in self._ask().items()}

    def _found(self, content: bytes) -> Found:
        return Found(ObjectStat(len(content), 0.0), hash(content))

    def _is_over(self, content: bytes) -> bool:
        return self.way in AFTERWARDS and self.sent >= len(content)

    def _wrongly(self, name: str, answer: bytearray, start: int, stop: int) -> bytes:
        if self.way == "an error":
            raise ConnectionResetError("the connection was reset")
        if self.way == "nothing in time":
            time.sleep(4 * HURRY_S + (stop - start) / 20e6)
        if self.way == "another object":
            other = self.draw.choice([one for one in self.objects if one != name])
            return self.objects[other][start:stop]
        if self.way == "a short answer":
            return bytes(answer[: self.draw.randrange(len(answer))])
        if self.way == "zeros":
            return bytes(len(answer))
        place = self.draw.randrange(len(answer))
        answer[place] ^= 1 << self.draw.randrange(8)
        return bytes(answer)

    def _ask(self) -> dict[str, bytes]:
        if self.way == "gone":
            raise ConnectionRefusedError("nobody listens")
        if self.way == "hangs":
            time.sleep(4 * HURRY_S)
        if self.way == "forgets":
            self.objects.clear()
        return self.objects
