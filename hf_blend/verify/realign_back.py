# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk that is moved away and back is as it was, up to the rounding of two moves."""

from .base import Check, Outcome, rounding
from .moving import FAR, home, keys_apart, moved, probe_chunk
from .subject import ModelUnderTest


class RealignBack(Check):
    """The two turns are inverse whatever the tables hold, so only rounding is left.

    This is a property of the `Realigner` alone. That it puts keys where the model does is shown by `moved_chunk`, from
    a forward of the model at the new place.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest difference of keys, as a share of the largest key."""
        chunk = probe_chunk(subject)
        back = moved(subject, moved(subject, chunk, FAR), home(subject))
        return Outcome(keys_apart(subject, back, chunk), rounding(subject.dtype, 0, moves=2))
