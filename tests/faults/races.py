# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Processes and threads that store, read, evict, delete and damage the same few chunks at the same time."""

import os
import random
import struct
import threading

import torch

from hf_blend.store import ChunkStore

from .fault import FaultClass, Verdict
from .world import drawn_chunk

PROCESSES = 3
THREADS = 2
CHUNKS = 6
ENTRY_BYTES = 34_000  # one of the middle length


class Races(FaultClass):
    """Every operation meets others on the same files; each one is counted as a fault."""

    share = 0.03

    def inject(self, count: int) -> None:
        """Let them loose, and add up what they saw."""
        each = count // (PROCESSES * THREADS) + 1
        pipes, children = [], []
        for _ in range(PROCESSES):
            receive, send = os.pipe()
            seed = self.random.randrange(1 << 30)
            child = os.fork()
            if child == 0:
                try:
                    os.close(receive)
                    os.write(send, struct.pack("<qq", *self._loose(each, seed)))
                finally:
                    os._exit(0)
            os.close(send)
            children.append(child)
            pipes.append(receive)
        for child, pipe in zip(children, pipes, strict=True):
            told = os.read(pipe, 16)
            os.close(pipe)
            os.waitpid(child, 0)
            if len(told) < 16:
                self.record("operations", Verdict.CRASHED, "a process ended early")
                continue
            done, wrong = struct.unpack("<qq", told)
            self.record("operations", Verdict.WRONG, "another chunk than the one that was asked for", count=wrong)
            self.record("operations", Verdict.RIGHT, count=done - wrong)

    def _loose(self, each: int, seed: int) -> tuple[int, int]:
        counts = [0, 0]
        cap_bytes = (CHUNKS - 2) * ENTRY_BYTES
        store = ChunkStore.open(self.folder, memory_bytes=2 * ENTRY_BYTES, disk_bytes=cap_bytes, durability="none")
        threads = [threading.Thread(target=self._use, args=(store, each, seed + n, counts)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return counts[0], counts[1]

    def _use(self, store: ChunkStore, each: int, seed: int, counts: list[int]) -> None:
        torch.set_num_threads(1)  # a forked child must not wake the pool of threads that it did not inherit
        draw = random.Random(seed)
        chunks = [drawn_chunk(number) for number in range(CHUNKS)]
        for _ in range(each):
            chunk, act = draw.choice(chunks), draw.random()
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
