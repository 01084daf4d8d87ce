# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that the question looks at (ProphetKV, InfoFlow KV, FusionRAG, QCFuse, by options).

Source: ProphetKV (arXiv 2602.02579): mean over all layers, heads and question tokens of the question's attention over
the stored KV. InfoFlow KV (2603.05353): some layers, length over the question's rows (`reduce="l2"`). FusionRAG
(2601.12904): `layers="last"`. QCFuse (2604.08585): the question itself looks at a few anchors of each chunk
(`probe="anchors"`, the tokens with the longest keys) and is scored in the middle layers.
Differs: the question is all that stands behind the last chunk; stored keys are at their true places in the prompt;
the probe is charged.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .attention import Attention, received
from .base import Selector, TokenView, by_turns, layer_numbers, norms


class QueryAttention(Selector):
    """Attention of the question over the stored KV.

    Options: `layers` ("all", "last", "middle" or numbers), `reduce` over the question's rows ("mean", "l2", "max" or
    "last"), `by_value` (weigh by the length of the value), `probe` ("full" or "anchors") with `anchor_ratio`.
    """

    needs_kv = False
    needs_question = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "layers": "all",
        "reduce": "mean",
        "by_value": False,
        "probe": "full",
        "anchor_ratio": 0.1,
    }

    def score(self, view: TokenView) -> Tensor:
        """Mean over the layers of what each token receives, `[batch, tokens]`."""
        reduce = self.choice("reduce", ("mean", "l2", "max", "last"))
        layers = layer_numbers(self.options["layers"], view.num_layers)
        anchors = self._anchors(view) if self.choice("probe", ("full", "anchors")) == "anchors" else None
        scores: list[Tensor] = []

        def receive(layer: int, seen: Attention, weights: Tensor) -> None:
            asking = view.is_question(seen.columns)
            scores.append(received(seen, weights, asking, reduce, self.options["by_value"]))

        view.probe(receive, layers, anchors)
        return view.take(torch.stack([score.to(view.columns.device) for score in scores]).mean(dim=0))

    def _anchors(self, view: TokenView) -> Tensor:
        """`[batch, columns]`: True but for the tokens of chunks that are no anchors."""
        lengths = norms(view.stored_alone(0)[0])
        turns = by_turns(lengths, view.chunk, view.chunk_tokens.clamp_min(1).float())
        others = (-turns > self.options["anchor_ratio"]) & (-turns * view.chunk_tokens > 1)  # each chunk keeps one
        columns = torch.ones(others.shape[0], int(view.columns.max()) + 1, dtype=torch.bool, device=others.device)
        return columns.scatter(1, view.columns, ~(others & view.reusable))
