# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Children that use a store until they are killed, and processes that race; what their parent must find then."""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from hf_blend.store import ChunkStore

from .damage import clear
from .fault import FaultClass, Verdict
from .world import drawn_chunk

KEPT = 12  # kills in one folder before it is emptied
CAP_CHUNKS = 6
ENTRY_BYTES = 34_000  # one of the middle length


class Killing(FaultClass):
    """The rules of every class that kills: what was acknowledged is there, what is listed is whole."""

    def inject(self, count: int) -> None:
        for _ in range(count):
            if self.outcome.kills % KEPT == 0:
                clear(self.folder)
                self.folder.mkdir()
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
            kept = [] if capped else acknowledged
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


def fork(act: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
    """Run `act` in a child, which tells numbers; gives its id and the pipe to read them from."""
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
    told: list[int] = []
    while part := os.read(pipe, 4):
        told.append(int.from_bytes(part, "little"))
    os.close(pipe)
    return told


CALLS = "open write fdatasync fsync replace unlink mkdir lstat stat scandir close preadv utime".split()
MODES = ("before", "after", "within")


class CallKills(Killing):
    """The child counts its calls and kills itself at one that is drawn, before it, after it or within it."""

    kill_share = 1.0

    def setup(self) -> None:
        self._calls = 60
        self._at = 1
        self._mode = MODES[0]

    def kill_one(self, capped: bool) -> list[int]:
        acknowledged = []
        first = self.outcome.kills * 1000
        while True:
            self._at, self._mode = self.random.randint(1, self._calls), self.random.choice(MODES)
            child, pipe = fork(lambda tell: self._act(capped, first, tell))  # noqa: B023
            _, status = os.waitpid(child, 0)
            acknowledged += read_numbers(pipe)
            self.outcome.paths[self._mode if os.WIFSIGNALED(status) else "outlived"] += 1
            if os.WIFSIGNALED(status):
                self._calls = max(self._calls, self._at * 5 // 4)
                return acknowledged
            self._calls = max(20, self._at - 1)
            first = first + 10

    def _act(self, capped: bool, first: int, tell: Callable[[int], None]) -> None:
        store = self.opened(capped)
        self._count_calls(os.write)
        for number in range(first + 1, first + 4):
            store.put(drawn_chunk(number))
            _quietly(partial(tell, number))
        store.put(drawn_chunk(first + 999))
        store.delete(drawn_chunk(first + 999).key)
        store.close()

    def _count_calls(self, real_write: Callable[..., int]) -> None:
        left = self._at
        mode = self._mode

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if _QUIET:
                    return real(*args, **kwargs)
                left -= 1
                if left == 0 and mode == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                if left == 0 and mode == "within" and name == "write":
                    real_write(args[0], memoryview(args[1])[: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                result = real(*args, **kwargs)
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return call

        for name in CALLS:
            setattr(os, name, counted(name, getattr(os, name)))


_QUIET: list[bool] = []


def _quietly(act: Callable[[], None]) -> None:
    """An acknowledgement is no call of the store."""
    _QUIET.append(True)
    act()
    _QUIET.pop()


PROCESSES = 3
THREADS = 2
RACING_CHUNKS = 6


class Races(FaultClass):
    """Every operation meets others on the same files; each one is counted as a fault."""

    share = 0.03

    def inject(self, count: int) -> None:
        each = count // (PROCESSES * THREADS) + 1
        seeds = [self.random.randrange(1 << 30) for _ in range(PROCESSES)]
        started = [fork(partial(self._loose, each, seed)) for seed in seeds]
        for child, pipe in started:
            told = read_numbers(pipe)
            os.waitpid(child, 0)
            if len(told) < 2:
                self.record("operations", Verdict.CRASHED, "a process ended early")
                continue
            done, wrong = told
            self.record("operations", Verdict.WRONG, "another chunk than the one that was asked for", count=wrong)
            self.record("operations", Verdict.RIGHT, count=done - wrong)

    def _loose(self, each: int, seed: int, tell: Callable[[int], None]) -> None:
        counts = [0, 0]
        cap_bytes = (RACING_CHUNKS - 2) * ENTRY_BYTES
        store = ChunkStore.open(self.folder, memory_bytes=2 * ENTRY_BYTES, disk_bytes=cap_bytes, durability="none")
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda number: self._use(store, each, seed + number, counts), range(THREADS)))
        for count in counts:
            tell(count)

    def _use(self, store: ChunkStore, each: int, seed: int, counts: list[int]) -> None:
        torch.set_num_threads(1)  # a forked child must not wake the pool of threads that it did not inherit
        draw = random.Random(seed)
        chunks = [drawn_chunk(number) for number in range(RACING_CHUNKS)]
        for _ in range(each):
            chunk = draw.choice(chunks)
            act = draw.random()
            if act < 0.4:
                store.put(chunk)
            elif act < 0.85:
                counts[1] += self.expect(store, chunk) is Verdict.WRONG
            elif act < 0.95:
                store.delete(chunk.key)
            else:
                self._damage(draw)
            counts[0] += 1

    def _damage(self, draw: random.Random) -> None:
        paths = list((self.folder / "objects").rglob("*.safetensors"))
        try:
            with open(draw.choice(paths or [self.folder / "none"]), "r+b") as entry:
                entry.seek(draw.randrange(ENTRY_BYTES))
                entry.write(draw.randbytes(2))
        except FileNotFoundError:
            return
