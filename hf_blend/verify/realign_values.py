# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Moving a chunk leaves every bit of its values."""

import torch

from .base import Check, Outcome, violations
from .moving import FAR, moved, probe_chunk, still
from .subject import ModelUnderTest


class RealignValues(Check):
    """Values carry no position; where attention is latent, what is cached as the keys does not.

    This is a property of the `Realigner` alone. That it puts keys where the model does is shown by `moved_chunk`, from
    a forward of the model at the new place.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of layers whose values changed; 0 is allowed."""
        chunk = probe_chunk(subject)
        pairs = zip(still(subject, moved(subject, chunk, FAR)), still(subject, chunk), strict=True)
        changed = [f"layer {index}" for index, (new, old) in enumerate(pairs) if not torch.equal(new, old)]
        return violations(changed)
