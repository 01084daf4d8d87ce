# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that the question looks at and whose K or V is far from the stored one (KVShare's DHD).

Source: KVShare (arXiv 2503.16525): attention weight times KV deviation.
Differs: both are taken at the check layer, the attention with fresh queries and keys at their true positions.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .attention import received
from .base import Selector, TokenView, squared_distance


class AttentionXDeviation(Selector):
    """Attention of the question at the check layer times distance. Options: `on` (v, k or kv), `reduce`."""

    needs_attention = True
    needs_pairs = False
    defaults: ClassVar[Mapping[str, Any]] = {"on": "v", "reduce": "mean"}

    def score(self, view: TokenView) -> Tensor:
        """Attention received from the question times the distance of fresh and stored states, `[batch, tokens]`."""
        parts = {"k": (0,), "v": (1,), "kv": (0, 1)}[self.choice("on", ("v", "k", "kv"))]
        reduce = self.choice("reduce", ("mean", "l2", "max", "last"))
        distance = sum(squared_distance(*view.pair(part)) for part in parts) ** 0.5
        seen = view.attention()
        asking = view.is_question(seen.columns)
        rows = slice(int(asking.any(dim=0).to(int).argmax()), None)
        looked = received(seen, seen.weights(rows), asking[:, rows], reduce)
        return view.take(looked) * distance
