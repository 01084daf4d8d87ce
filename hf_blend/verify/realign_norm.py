# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Moving a chunk keeps the length of every key, up to what the model's own tables do to it."""

import torch

from ..store.chunk import ChunkKV
from .base import Check, Outcome, rounding
from .moving import FAR, moved, probe_chunk, turning
from .subject import ModelUnderTest


class RealignNorm(Check):
    """A table rounded to bfloat16 is not quite on the circle; by how much is read off the tables.

    This is a property of the `Realigner` alone. That it puts keys where the model does is shown by `moved_chunk`, from
    a forward of the model at the new place.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest difference of the lengths of keys, as a share of the longest of the layer."""
        chunk = probe_chunk(subject)
        far = moved(subject, chunk, FAR)
        shares = [
            float((_lengths(keys) - _lengths(before)).abs().amax() / _lengths(before).amax())
            for keys, before in zip(turning(subject, far), turning(subject, chunk), strict=True)
        ]
        return Outcome(max(shares), rounding(subject.dtype, 0, moves=1) + _unevenness(chunk, far))


def _lengths(keys: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(keys.double(), dim=-1)


def _unevenness(one: ChunkKV, other: ChunkKV) -> float:
    """How far the tables stretch at one place against another."""
    pairs = zip(one.tables, other.tables, strict=True)
    radii = [[(cos.double() ** 2 + sin.double() ** 2).sqrt() for cos, sin in pair] for pair in pairs]
    return max((float((b / a - 1).abs().amax()) for a, b in radii), default=0.0)
