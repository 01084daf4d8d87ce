# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Moving a chunk by a and then by b is moving it by a + b, up to the rounding of three moves."""

from .base import Check, Outcome, rounding
from .moving import FAR, NEAR, keys_apart, moved, probe_chunk
from .subject import ModelUnderTest


class RealignSum(Check):
    """What is in between drops out of the composition, whatever the tables hold.

    This is a property of the `Realigner` alone. That it puts keys where the model does is shown by `moved_chunk`, from
    a forward of the model at the new place.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest difference of keys, as a share of the largest key."""
        chunk = probe_chunk(subject)
        twice = moved(subject, moved(subject, chunk, NEAR), FAR)
        return Outcome(keys_apart(subject, twice, moved(subject, chunk, FAR)), rounding(subject.dtype, 0, moves=3))
