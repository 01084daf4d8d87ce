# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Between 0 and 1 the sparse path equals a dense forward in which the slots not chosen hold the stored K and V."""

from .base import Check, Outcome
from .spliced import fused_error
from .subject import ModelUnderTest

RATIO = 0.3


class FusedRatio(Check):
    """One request alone, and three side by side."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the questions' logits."""
        groups = [subject.prompts[:1], subject.prompts]
        return Outcome(max(fused_error(subject, group, RATIO) for group in groups), subject.logit_tolerance)
