# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ratio 1.0 leaves the K and V of a full prefill in the cache, at every layer and token."""

from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest


class Ratio1States(Check):
    """What the answer will look at is all there, also in a padded batch."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of any K or V of a real token."""
        got, errors = subject.blend(subject.prompts, 1.0), []
        for row, run in enumerate(subject.plain(subject.prompts)):
            tokens = run.logits.shape[0]
            for mine, wanted in zip(got.layers, run.layers, strict=True):
                errors += [distance(one[row, :, -tokens:], other) for one, other in zip(mine, wanted, strict=True)]
        return Outcome(max(errors), max(subject.floor.states, subject.logit_tolerance))
