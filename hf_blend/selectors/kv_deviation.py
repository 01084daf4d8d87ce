# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens whose fresh K or V is farthest from the stored one (CacheBlend's HKVD tokens).

Source: CacheBlend (arXiv 2405.16444), section 4.3. Differs: scores are summed in float32; K are compared after
realignment, which leaves the distance unchanged, since a rotation keeps lengths.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .base import Selector, TokenView, squared_distance


class KvDeviation(Selector):
    """Squared distance, summed over heads and dimensions. Option `on`: "v" (as the released code), "k" or "kv"."""

    defaults: ClassVar[Mapping[str, Any]] = {"on": "v"}

    def score(self, view: TokenView) -> Tensor:
        """Squared distance of fresh and stored states, `[batch, tokens]`."""
        parts = {"k": (0,), "v": (1,), "kv": (0, 1)}[self.choice("on", ("v", "k", "kv"))]
        distances = [squared_distance(*view.pair(state)) for state in parts]
        return distances[0] if len(distances) == 1 else distances[0] + distances[1]
