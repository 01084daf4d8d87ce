# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""After tokens are removed and the rest closes up, layer 0 has the K and V of a direct forward of what is left."""

import torch

from ..context.oracles import closed_hole
from ..context.sequence_cache import SequenceCache
from ..errors import UnsupportedModelError
from ..model.placement import input_device
from .base import Check, Outcome, refused, rounding
from .floor import distance
from .moving import sequence_of
from .subject import ModelUnderTest

TOKENS = 40
HOLE = (10, 20)  # tokens


class ClosedHole(Check):
    """Layer 0 does not depend on what was removed; a key is rounded as where a chunk is moved."""

    @torch.no_grad()
    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of any K or V of layer 0."""
        try:
            cache = SequenceCache(subject.model)
        except UnsupportedModelError as error:
            return refused(error)
        ids = sequence_of(subject, TOKENS)
        with cache:
            subject.model(ids.to(input_device(subject.model)), past_key_values=cache, use_cache=True)
        compared = closed_hole(subject.model, cache, ids, *HOLE)
        largest = max(float(one.expected.abs().amax()) for one in compared)
        errors = [distance(one.got, one.expected) for one in compared]
        return Outcome(max(errors), subject.floor.layer_0 + largest * rounding(subject.dtype, 6, moves=1))
