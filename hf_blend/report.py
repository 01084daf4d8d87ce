# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request cost: the one honest meter."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from .flops import LayerCost


@dataclass
class BlendReport:
    """Tokens, charged budget and time of one prefill.

    Attributes:
        nominal_ratio: the share of the reusable tokens that was asked for.
        prompt_tokens: real tokens of the prompt, all batch entries.
        reusable_tokens: those with stored KV that is not exact: the ones that a choice is made among.
        exact_tokens: those with stored KV that a full prefill would have computed just so; never recomputed.
        computed_chunks: chunks that were missing, and were computed and stored for this request.
        loaded_chunks: chunks that came from the store.
        refused_chunks: chunks whose stored KV was not that of their tokens; computed like a question.
        full_prefills: full prefills that a selector asked for; research only.
        realign_ms: host time for moving stored KV to its place.
        select_ms: host time for scoring and choosing.
        chosen_columns: for each batch entry the reusable columns that the first choice let go on.
    """

    nominal_ratio: float = 0.0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    exact_tokens: int = 0
    computed_chunks: int = 0
    loaded_chunks: int = 0
    refused_chunks: int = 0
    full_prefills: int = 0
    realign_ms: float = 0.0
    select_ms: float = 0.0
    chosen_columns: list[list[int]] = field(default_factory=list)
    _past: int = 0
    _costs: list[LayerCost] = field(default_factory=list, repr=False)
    _spent_flops: float = field(default=0.0, repr=False)
    _full_flops: float = field(default=0.0, repr=False)
    _bound_flops: float = field(default=0.0, repr=False)

    def saw_rows(self, layer: int, flowing: Tensor, reusable: Tensor) -> None:
        """Charge a layer for the reusable tokens that run through it.

        Args:
            layer: which layer.
            flowing: `[batch, tokens]`, the columns that it computes.
            reusable: `[batch, tokens]`, the columns that the budget is about.
        """
        cost = self._costs[layer]
        self._spent_flops += cost.of_columns((flowing & reusable).nonzero()[:, 1] + self._past)
        self._full_flops += cost.of_columns(reusable.nonzero()[:, 1] + self._past)

    def looked(self, layer: int, flowing: Tensor, reusable: Tensor) -> None:
        """Charge a layer for the K and V of reusable tokens that were computed only to be looked at."""
        self._spent_flops += self._costs[layer].before_kv * int((flowing & reusable).sum())

    @property
    def charged_budget(self) -> float:
        """FLOPs spent on the reusable tokens over those that a full prefill spends on them; 0 without any."""
        if not self._full_flops:
            return 0.0
        return self._spent_flops / self._full_flops + self.full_prefills

    def as_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        shown = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return {**shown, "charged_budget": round(self.charged_budget, 6)}

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"{self.prompt_tokens} tokens: {self.exact_tokens} exact, {self.reusable_tokens} reusable, of which "
            f"{sum(map(len, self.chosen_columns))} recomputed (nominal {self.nominal_ratio:.0%}, charged "
            f"{self.charged_budget:.1%}); {self.loaded_chunks} chunks loaded, {self.computed_chunks} computed; "
            f"realign {self.realign_ms:.1f} ms, select {self.select_ms:.1f} ms"
        )
