# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for a slow tier: as long as it takes to compute the chunk, and no longer."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..threads import new_lock, start
from .chunk import ChunkKey

__all__ = ["ComputeTimes", "LateLoads"]

MOST_LATE = 4  # loads that nobody waits for any more; while there are so many, a slow tier is not asked
_NEW_SHARE = 0.25  # of the newest time in the average
Loaded = TypeVar("Loaded")


class ComputeTimes:
    """Seconds per token that chunks of each model took to compute and put, as a moving average."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._per_token_s: dict[str, float] = {}
        self._lock = new_lock()

    @contextlib.contextmanager
    def timed(self, *keys: ChunkKey) -> Iterator[None]:
        """Learn from a block that computes chunks of one model and puts them.

        The copy to the CPU is when a device has finished.
        """
        began_s = self._clock()
        yield
        took_s = (self._clock() - began_s) / sum(len(key.token_ids) for key in keys)
        identity = keys[0].fingerprint
        with self._lock:
            known_s = self._per_token_s.get(identity, took_s)
            self._per_token_s[identity] = known_s + _NEW_SHARE * (took_s - known_s)

    def expect_s(self, key: ChunkKey) -> float:
        """How long computing a chunk takes, in seconds; infinite as long as none of its model was computed."""
        return len(key.token_ids) * self._per_token_s.get(key.fingerprint, math.inf)


class LateLoads:
    """Runs loads that are given up when they take too long; they end by themselves, in threads of their own."""

    def __init__(self) -> None:
        self._late: set[Future[Any]] = set()

    def run(self, load: Callable[[], Loaded], budget_s: float) -> Loaded | None:
        """Load, and wait no longer than the budget."""
        if sum(not loading.done() for loading in list(self._late)) >= MOST_LATE:  # a parent's are done in its child
            return None
        try:
            loading = start(load, "hf_blend-load")
        except RuntimeError:  # no thread can be started
            return load()
        if wait([loading], budget_s).done:
            return loading.result()
        self._late.add(loading)
        loading.add_done_callback(self._late.discard)
        return None
