# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A sequence that is shifted as a whole continues with the logits of a plain forward at its new positions."""

from ..context.oracles import whole_shift
from ..context.sequence_cache import SequenceCache
from ..errors import UnsupportedModelError
from .base import Check, Outcome, refused
from .floor import distance
from .moving import sequence_of
from .subject import ModelUnderTest

HELD_TOKENS, MORE_TOKENS = 40, 6
SHIFT = 77  # positions


class WholeShift(Check):
    """A prefill in a sequence cache, a shift of everything, and some tokens more."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of logits."""
        try:
            cache = SequenceCache(subject.model)
        except UnsupportedModelError as error:
            return refused(error)
        ids = sequence_of(subject, HELD_TOKENS + MORE_TOKENS)
        logits = whole_shift(subject.model, cache, ids, HELD_TOKENS, SHIFT)[-1]
        return Outcome(distance(logits.got, logits.expected), subject.logit_tolerance)
