# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk moved to another place has, at every layer, the K and V that the model computes for it alone there."""

import torch
from torch import Tensor

from ..model.capture import capture
from .base import Check, Outcome, rounding
from .floor import device_of, distance
from .moving import CHUNK_TOKENS, FAR, home, moved, probe_chunk
from .subject import ModelUnderTest


class MovedChunk(Check):
    """Behind the same sink, everything shifted: by the composed turn of each layer, with each layer's own table."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of any K or V, or of a mixer's projections, of any layer."""
        there = _alone_at(subject, FAR)
        got = moved(subject, probe_chunk(subject), FAR).layers
        pairs = [pair for one, other in zip(got, there, strict=True) for pair in zip(one, other, strict=True)]
        errors = [distance(*pair) for pair in pairs]
        largest = max(float(states.abs().amax()) for layer in there for states in layer)
        return Outcome(max(errors), 2 * subject.floor.states + largest * rounding(subject.dtype, 6, moves=1))


def _alone_at(subject: ModelUnderTest, start: int) -> list[tuple[Tensor, ...]]:
    """What is kept of the probe chunk, `[kv_heads, tokens, head_dim]`, computed with its first token at `start`."""
    ids = (*subject.chunk_prefix_ids, *subject.ids(CHUNK_TOKENS, seed=7))
    places = torch.arange(len(ids), device=device_of(subject.model)) + start - home(subject)
    layers = capture(subject.model, torch.tensor([ids]), places[None]).layers
    return [tuple(states[0, :, home(subject) :] for states in layer) for layer in layers]
