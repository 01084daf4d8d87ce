# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much of the model each tenant has had: who has had least goes first.

Start-time fair queueing: a tenant that comes back from being away begins a second ahead of the one that had least of
those that are there. So nobody saves up more than that, and who asks for less than an equal share finds itself first.
"""

import time
from collections.abc import Iterable

from ..threads import new_lock

__all__ = ["Shares"]

AHEAD_S = 1.0  # by which one who comes is ahead
LATELY_S = 60.0


class Shares:
    """Seconds of work on the model that each tenant has had, until nobody is there."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._level = 0.0  # what those who ask have had at least; it never falls while one does
        self._came: dict[str, float] = {}  # when each last asked, or was there
        self._lock = new_lock()

    def come(self, tenant: str, here: Iterable[str]) -> None:
        """Note that a tenant asks, and whose requests are under way."""
        now, others = time.monotonic(), {*here}
        with self._lock:
            lately = {one: at for one, at in self._came.items() if now - at < LATELY_S}
            self._came = {**lately, **dict.fromkeys(others, now), tenant: now}
            if not others:
                self._had, self._level = {}, 0.0
            self._level = max(self._level, min((self._had.get(one, 0.0) for one in others), default=0.0))
            if tenant not in others:
                least = self._level - AHEAD_S
                self._had[tenant] = max(self._had.get(tenant, least), least)

    def add(self, tenant: str, seconds: float) -> None:
        """Count what was computed for a tenant."""
        with self._lock:
            self._had[tenant] = self._had.get(tenant, 0.0) + seconds

    def of(self, tenant: str) -> float:
        """What a tenant has had, beside others."""
        return self._had.get(tenant, 0.0)

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant has asked of late, or was there when another did."""
        return len(self._came) > 1
