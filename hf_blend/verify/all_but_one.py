# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""With every reusable token but one recomputed, the sparse path equals a dense forward in which that one is stale."""

from .base import Check, Outcome
from .spliced import fused_error
from .subject import ModelUnderTest


class AllButOne(Check):
    """Ratio 1 - 1/n, for each request alone: the sparse path cannot fall back to a full prefill."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the questions' logits."""
        errors = []
        for prompt in subject.prompts:
            tokens = sum(map(len, prompt.chunks))
            errors.append(fused_error(subject, [prompt], 1 - 1 / tokens))
        return Outcome(max(errors), subject.logit_tolerance)
