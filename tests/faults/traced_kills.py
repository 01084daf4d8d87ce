# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""kill -9 at the n-th real system call of a put and its eviction, by strace, where that is installed."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .killing import Killing, read_numbers
from .world import drawn_chunk

CALLS = "openat,write,fdatasync,fsync,rename,unlink,mkdir,newfstatat,getdents64,close,pread64,preadv"
MOST = 60


class TracedKills(Killing):
    """Slow, so only some; the same child as everywhere, but nothing in it knows that it will be killed."""

    kill_share = 0.01

    def kill_one(self, capped: bool) -> list[int]:
        """Kill at the next call."""
        tracer = shutil.which("strace")
        at = self.outcome.kills % MOST + 1
        ready, go = os.pipe()

        def act(tell: Callable[[int], None]) -> None:
            os.read(ready, 1)
            first = self.outcome.kills * 1000
            with self.opened(capped) as store:
                for number in range(first + 1, first + 6):
                    store.put(drawn_chunk(number))
                    tell(number)

        child, pipe = self.fork(act)
        command = [tracer or "", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}", "-p", str(child)]
        command += ["-e", f"inject={CALLS}:signal=KILL:when={at}"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) if tracer else _nothing() as tracing:
            _wait_for_tracer(child, bool(tracer))
            os.write(go, b"g")
            os.waitpid(child, 0)
            tracing.wait()
        os.close(ready)
        os.close(go)
        self.outcome.paths["strace" if tracer else "without strace"] += 1
        return read_numbers(pipe)


class _nothing:
    """Stands for a tracer that is not installed."""

    def __enter__(self) -> "_nothing":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def wait(self) -> None:
        """Nothing to wait for."""


def _wait_for_tracer(child: int, wanted: bool) -> None:
    deadline_s = time.monotonic() + 10
    while wanted and time.monotonic() < deadline_s:
        if "TracerPid:\t0" not in Path(f"/proc/{child}/status").read_text():
            time.sleep(0.005)
            return
        time.sleep(0.001)
