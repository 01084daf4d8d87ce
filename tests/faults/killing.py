# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A child that uses a store until it is killed, and what its parent must find then."""

import os
import sys
import traceback
from collections.abc import Callable

from hf_blend.store import ChunkStore

from .damage import clear
from .fault import FaultClass, Verdict
from .world import drawn_chunk

__all__ = ["Killing"]

KEPT = 12  # kills in one folder before it is emptied
PINNED = 0
CAP_CHUNKS = 6
ENTRY_BYTES = 34_000  # one of the middle length


class Killing(FaultClass):
    """The rules of every class that kills: what was acknowledged is there, what is listed is whole."""

    def inject(self, count: int) -> None:
        """Kill so many children."""
        for _ in range(count):
            if self.outcome.kills % KEPT == 0:
                clear(self.folder)
                self.folder.mkdir()
                with self.opened(capped=False) as store:
                    store.put(drawn_chunk(PINNED))
                    store.pin(drawn_chunk(PINNED).key)
            capped = self.outcome.kills // KEPT % 2 == 1
            self.check(self.kill_one(capped), capped)

    def opened(self, capped: bool) -> ChunkStore:
        """The store, with room for a few chunks only if `capped`."""
        cap_bytes = CAP_CHUNKS * ENTRY_BYTES if capped else 1 << 30
        return ChunkStore.open(self.folder, memory_bytes=0, disk_bytes=cap_bytes, durability="full")

    def kill_one(self, capped: bool) -> list[int]:
        """Start a child, kill it, and give the numbers of the chunks that it acknowledged."""
        raise NotImplementedError

    def check(self, acknowledged: list[int], capped: bool) -> None:
        """Look at what the child left, with the eyes of a new process."""
        self.outcome.kills += 1
        self.outcome.paths["acknowledged"] += len(acknowledged)
        self.judge("capped" if capped else "not capped", lambda: self._look(acknowledged, capped))
        if self.outcome.kills % KEPT == 0:
            left = list((self.folder / "objects").rglob("*.tmp"))
            self.note("left half-written", Verdict.LOST, str(left[:2]), count=len(left))

    def _look(self, acknowledged: list[int], capped: bool) -> Verdict:
        """What was acknowledged is there, if there is room; what is listed is whole."""
        with self.opened(capped) as store:
            kept = [PINNED] if capped else [PINNED, *acknowledged]
            verdicts = [self.find(store, drawn_chunk(number)) for number in kept]
            if capped:  # may have been evicted since
                verdicts += [self.expect(store, drawn_chunk(number)) for number in acknowledged[-2:]]
            if any(store.stats()["load_failures"].values()):
                return Verdict.LOST
        with self.opened(capped) as store:
            torn = [found for found in store.check() if found.reason]
        for verdict in (Verdict.WRONG, Verdict.LOST):
            if verdict in verdicts:
                return verdict
        return Verdict.LOST if torn else Verdict.RIGHT

    def fork(self, act: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
        """Run `act` in a child, which acknowledges numbers; gives its id and the pipe to read them from."""
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(receive)
                act(lambda number: _tell(send, number))
                os._exit(0)
            finally:
                sys.stderr.write(traceback.format_exc())
                os._exit(1)
        os.close(send)
        return child, receive


def _tell(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(4, "little"))


def read_numbers(pipe: int) -> list[int]:
    """All numbers that a child told before it ended."""
    content = b""
    while part := os.read(pipe, 65536):
        content += part
    os.close(pipe)
    return [int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content) - 3, 4)]
