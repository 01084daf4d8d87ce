# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk that is used least often leaves first, recent uses counting more."""

from .base import EvictionPolicy, add_use


class Lfu(EvictionPolicy):
    """The score is the number of uses, each of which counts half after a day."""

    def score(self, before: float, now_s: float, weight: float) -> float:
        """Count a use; a report is none."""
        return add_use(before, now_s, 1.0) if weight > 0 else before
