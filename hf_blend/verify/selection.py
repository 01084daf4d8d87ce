# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chosen tokens are sorted, unique, of the chunks only, exactly ⌈ratio·n⌉, and nested as the ratio grows."""

import math

from ..store import ChunkStore
from .base import Check, Outcome, violations
from .slots import reusable
from .subject import ModelUnderTest

RATIOS = (0.0, 0.05, 0.15, 0.5, 0.99, 1.0)


class Selection(Check):
    """For the default selector, in a batch of requests of different lengths."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of broken promises; 0 is allowed."""
        store, wrong = ChunkStore.open("memory://"), []
        smaller: list[set[int]] = [set() for _ in subject.prompts]
        for ratio in RATIOS:
            got = subject.blend(subject.prompts, ratio, store)
            chosen = got.cache.report.chosen_columns or [[] for _ in subject.prompts]
            for row, columns in enumerate(chosen):
                allowed = set(reusable(got)[row].nonzero().flatten().tolist())
                wrong += _broken(columns, allowed, ratio, smaller[row])
            smaller = [set(columns) for columns in chosen]
        return violations(wrong)


def _broken(columns: list[int], allowed: set[int], ratio: float, smaller: set[int]) -> list[str]:
    wanted = math.ceil(round(ratio * len(allowed), 6))
    promises = {
        f"{len(columns)} chosen where {wanted} are wanted": len(columns) == wanted,
        "not sorted": columns == sorted(columns),
        "not unique": len(set(columns)) == len(columns),
        "outside of the chunks": set(columns) <= allowed,
        "a token chosen at a smaller ratio is missing": smaller <= set(columns),
    }
    return [f"ratio {ratio}: {promise}" for promise, kept in promises.items() if not kept]
