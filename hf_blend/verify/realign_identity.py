# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk that is moved by 0 keeps every bit."""

from .base import Check, Outcome
from .moving import home, keys_apart, moved, probe_chunk
from .subject import ModelUnderTest


class RealignIdentity(Check):
    """Where old and new tables are equal the turn is exactly 1.

    This is a property of the `Realigner` alone. That it puts keys where the model does is shown by `moved_chunk`, from
    a forward of the model at the new place.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest difference of keys, as a share of the largest key; 0 is allowed."""
        chunk = probe_chunk(subject)
        return Outcome(keys_apart(subject, moved(subject, chunk, home(subject)), chunk), 0.0)
