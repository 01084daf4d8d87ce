# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The least recently used chunk leaves first."""

from .base import EvictionPolicy, State


class Lru(EvictionPolicy):
    """The score is the time of the last use."""

    reads_importance = False

    def updated(self, state: State | None, stamp_s: float, uses: float, important_ratio: float | None) -> State:
        """When the object was last used."""
        return (stamp_s,)
