# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""With all other tokens at distance 1, Self-Extend's every layer gives what the stock layer gives at 0, … 0, 1."""

from typing import Any

from torch import Tensor

from ..context.oracles import far_rows
from ..context.self_extend import self_extend
from ..errors import UnsupportedModelError
from ..model.trust import FLOORS
from .base import Check, Outcome, refused, rounding
from .floor import distance
from .moving import sequence_of
from .subject import ModelUnderTest

TOKENS = 24
TRAINED_TOKENS, GROUP_TOKENS = 64, 1000


class SelfExtend(Check):
    """Window 1 and one group for all; queries and keys are rounded as where they are moved once each."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest difference of what a layer adds to the last token, as a share of the largest number of that."""
        settings: dict[str, Any] = {"trained_tokens": TRAINED_TOKENS, "window_tokens": 1, "group_tokens": GROUP_TOKENS}
        try:
            with self_extend(subject.model, **settings):
                pass
        except UnsupportedModelError as error:
            return refused(error)
        rows = far_rows(subject.model, sequence_of(subject, TOKENS), lambda: self_extend(subject.model, **settings))
        noise = max(_share(row.again, row.plain) for row in rows)
        tolerance = max(FLOORS * noise, rounding(subject.dtype, 12, moves=2))
        if max(_share(row.plain, row.expected) for row in rows) <= tolerance:
            return Outcome(float("inf"), tolerance, "the distances change nothing in any layer, so nothing was shown")
        return Outcome(max(_share(row.got, row.expected) for row in rows), tolerance)


def _share(got: Tensor, expected: Tensor) -> float:
    return distance(got, expected) / float(expected.float().abs().amax())
