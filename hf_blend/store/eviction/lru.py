# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The least recently used chunk leaves first."""

from .base import EvictionPolicy


class Lru(EvictionPolicy):
    """The score is the time of the last use."""

    reads_importance = False

    def score(self, used_s: float, frequency: float, important_ratio: float) -> float:
        """When the object was last used."""
        return used_s
