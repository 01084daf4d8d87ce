# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`dependency` with most of the budget in the first layers: made for the bundled reference model, not recommended.

Three times the asked ratio in the first quarter of the layers, the rest of it evenly behind; the mean over the layers
is the asked ratio. It was chosen on one small model that binds in its first layers (benchmarks/results/study.json).
On real text it is beaten by its own parts: SmolLM2-135M-Instruct on 40 prompts of HotpotQA, KL divergence to a full
prefill over ten tokens, leaves 0.65 of full reuse's at a charge of 0.171, where `dependency` leaves 0.58 at 0.161 and
`kv-deviation` 0.44 at 0.180. On the bundled chain model it is little better than full reuse (results/eval2.json).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .. import plugins
from .base import Selector, TokenView

EARLY, FRONT = 0.25, 3.0  # share of the layers that come early, and how much more they get


class Auto(Selector):
    """`dependency`, spent early; it takes no options."""

    needs_attention = True
    needs_pairs = False
    at_layer_0 = True
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """See `Selector`."""
        super().__init__(options, seed)
        self._rule: Selector = plugins.load("selectors", "dependency")({}, seed)

    def candidates(self, ratio: float) -> float | None:
        """See `Selector.candidates`."""
        return self._rule.candidates(ratio)

    def schedule(self, ratio: float, num_layers: int) -> dict[int, float] | None:
        """See `Selector.schedule`."""
        early = max(1, round(num_layers * EARLY))
        first = min(1.0, FRONT * ratio, ratio * num_layers / early)
        rest = max(0.0, ratio * num_layers - first * early) / max(1, num_layers - early)
        return {0: first, early: min(first, rest)} if early < num_layers else {0: ratio}

    def score(self, view: TokenView) -> Tensor:
        """The rule's scores, `[batch, tokens]`."""
        return self._rule.score(view)
