# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much of the model each tenant has had of late: who has had least goes first."""

import threading
import time

__all__ = ["Shares"]

HALF_S = 60.0  # after so many seconds half of what a tenant had is forgotten
LEAST = 1.0  # of a token: with less, a tenant counts as away


class Shares:
    """Tokens that were computed for each tenant, which fade with time."""

    def __init__(self) -> None:
        self._had: dict[str, float] = {}  # in tokens as of `_since`
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def add(self, tenant: str, tokens: int) -> None:
        """Count tokens that are computed for a tenant."""
        with self._lock:
            now = time.monotonic()
            fading = 0.5 ** ((now - self._since) / HALF_S)
            had = {one: had * fading for one, had in self._had.items() if had * fading >= LEAST}
            self._had, self._since = {**had, tenant: had.get(tenant, 0.0) + tokens}, now

    def of(self, tenant: str) -> float:
        """What a tenant has had, beside others."""
        return self._had.get(tenant, 0.0)

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant had some of late."""
        return len(self._had) > 1
