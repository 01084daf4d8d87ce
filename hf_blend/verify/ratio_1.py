# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ratio 1.0 through the sparse path gives the logits of a full prefill."""

from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest


class Ratio1(Check):
    """The prefix is reused, every chunk token is recomputed as a chosen one."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the question's logits, over requests that run alone."""
        errors = []
        for prompt in subject.prompts:
            got = subject.blend([prompt], 1.0)
            report = got.cache.report
            if not report.reusable_tokens or report.reusable_tokens != sum(map(len, report.chosen_columns)):
                return Outcome(float("inf"), 0.0, f"the sparse path was not taken: {report}")
            errors.append(distance(got.asked, subject.asked([prompt])))
        return Outcome(max(errors), subject.logit_tolerance)
