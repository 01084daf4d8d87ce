# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier that gives no more than so many bytes a second: for measurements of what a slower one would do."""

import threading
import time
from typing import Any

from hf_blend.store.tiers.base import Source, Tier

__all__ = ["ThrottledTier", "WrappedTier"]

SLACK_S = 1e-3  # what a sleep lasts too long, or a reader pauses, is made up for by reads that follow within this time


def _passed_on(method: str) -> Any:
    """A method that is the one of the tier behind."""

    def call(self: "WrappedTier", *given: Any, **named: Any) -> Any:
        return getattr(self.tier, method)(*given, **named)

    return call


class WrappedTier(Tier):
    """Does what the tier behind does."""

    open = _passed_on("open")
    put_if_absent = _passed_on("put_if_absent")
    replace = _passed_on("replace")
    delete = _passed_on("delete")
    shards = _passed_on("shards")
    listing = _passed_on("listing")
    stat = _passed_on("stat")
    contains = _passed_on("contains")
    set_pin = _passed_on("set_pin")
    pins = _passed_on("pins")
    remove_orphans = _passed_on("remove_orphans")
    close = _passed_on("close")

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.is_local = tier.is_local

    @property
    def is_healthy(self) -> bool:
        """As the tier behind."""
        return self.tier.is_healthy


class ThrottledTier(WrappedTier):
    """Reads from the tier behind, all readers together at a bounded rate."""

    def __init__(self, tier: Tier, bytes_s: float) -> None:
        super().__init__(tier)
        self._bytes_s, self._free_at, self._lock = bytes_s, 0.0, threading.Lock()

    def open(self, name: str) -> Source | None:
        """As the tier behind, to be read slowly."""
        source = self.tier.open(name)
        return None if source is None else _SlowSource(source, self)

    def wait(self, nbytes: int, begun: float) -> None:
        """Wait until so many more bytes may have come."""
        with self._lock:
            self._free_at = max(self._free_at, begun - SLACK_S) + nbytes / self._bytes_s
            ahead = self._free_at - time.perf_counter()
        if ahead > 0:
            time.sleep(ahead)


class _SlowSource:
    def __init__(self, source: Source, tier: ThrottledTier) -> None:
        self._source = source
        self._tier = tier
        self.stat, self.identity = source.stat, source.identity

    def read_into(self, start: int, target: memoryview) -> None:
        nbytes = len(target)
        begun = time.perf_counter()
        self._source.read_into(start, target)
        self._tier.wait(nbytes, begun)

    def expect(self, start: int, nbytes: int) -> None:
        """Pass it on to the tier behind."""
        getattr(self._source, "expect", _ignore)(start, nbytes)

    def close(self) -> None:
        self._source.close()


def _ignore(start: int, nbytes: int) -> None:
    """For sources that read nothing ahead."""
