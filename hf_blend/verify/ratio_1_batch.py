# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ratio 1.0 of three requests side by side, padded on the left, gives the logits of their full prefill."""

from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest


class Ratio1Batch(Check):
    """The requests differ in prefix, number and length of chunks, and question."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the questions' logits."""
        got = subject.blend(subject.prompts, 1.0)
        if not all(got.cache.report.chosen_columns):
            return Outcome(float("inf"), 0.0, f"the sparse path was not taken: {got.cache.report}")
        return Outcome(distance(got.asked, subject.asked(subject.prompts)), subject.logit_tolerance)
