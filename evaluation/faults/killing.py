# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A child that uses a store until it is killed, and what its parent must find then."""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable

from hf_blend.store import ChunkStore

from . import base
from .base import name_of, tiny_chunk

__all__ = ["Killing"]

KEPT = 12  # kills in one folder before it is emptied
PINNED = 0
CAP_CHUNKS = 6
NAMESPACE = name_of(tiny_chunk(PINNED).key)[:2]


class Killing(base.FaultClass):
    """The rules of every class that kills: what was acknowledged is there, what is listed is whole."""

    def inject(self, count: int) -> None:
        """Kill so many children."""
        for _ in range(count):
            signal.alarm(base.HANG_S)
            if self.outcome.kills % KEPT == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
                with self.opened(capped=False) as store:
                    store.put(tiny_chunk(PINNED))
                    store.pin(tiny_chunk(PINNED).key)
            capped = self.outcome.kills // KEPT % 2 == 1
            self.check(self.kill_one(capped), capped)

    def opened(self, capped: bool) -> ChunkStore:
        """The store, with room for a few chunks only if `capped`."""
        cap_bytes = CAP_CHUNKS * 1600 if capped else 1 << 30
        return ChunkStore.open(self.folder, memory_bytes=0, disk_bytes=cap_bytes, durability="full")

    def kill_one(self, capped: bool) -> list[int]:
        """Start a child, kill it, and give the numbers of the chunks that it acknowledged."""
        raise NotImplementedError

    def check(self, acknowledged: list[int], capped: bool) -> None:
        """Look at what the child left, with the eyes of a new process."""
        self.outcome.kills += 1
        self.outcome.faults += 1
        acked = self.outcome.regions.get("acknowledged", 0) + len(acknowledged)
        self.outcome.regions["acknowledged"] = acked
        with self.opened(capped) as store:
            listed = {entry.digest: entry for entry in store.entries()}
            for number in [PINNED] if capped else [PINNED, *acknowledged]:
                listed.pop(tiny_chunk(number).key.digest, None)
                self.outcome.lost += not self.expect(store, tiny_chunk(number))
            for number in acknowledged[-2:] if capped else ():  # may have been evicted since
                self.expect(store, tiny_chunk(number))
            self.outcome.torn += sum(store.stats()["load_failures"].values())
            if self.outcome.kills % KEPT == 0:
                self.outcome.torn += len(list((self.folder / "objects").rglob("*.tmp")))
        for entry in list(listed.values())[:8]:  # never acknowledged: may be there, but then whole
            path = self.folder / "objects" / f"{NAMESPACE}/{entry.digest[:2]}/{entry.digest}.safetensors"
            self.outcome.torn += path.exists() and path.stat().st_size != entry.nbytes

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
