# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that the question reads and that lack what stood before their chunk.

A token is worth repairing if two things hold: the answer is read from it, and it would be another one in this prompt.
The second is known at layer 0 for the price of its queries: queries, keys and values there depend on the token alone,
so all that is wrong with a chunk begins with what its tokens take from earlier chunks there. `missing` is the distance
between what a token takes from all keys and what it takes from its own chunk and the sink. `read` is the attention of
the question's last token over the stored KV, in layers where models bind (`layers`). The score is their product.
Nothing else of layer 0 is computed for tokens that are not chosen, and only `candidates` times as many as will be
chosen are looked at there, those that are read most. What is computed is charged.

Source: ours; the product follows KVShare (arXiv 2503.16525), the probe ProphetKV (2602.02579). With `closure`, a token
also counts for what it gives at layer 0 to tokens that are read: a token repaired without what it depends on stays
wrong.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .attention import Attention, received
from .base import Selector, TokenView, layer_numbers


class Dependency(Selector):
    """What is read times what is missing.

    Options: `layers` and `reduce` of the reading, `candidates` (how many of those that are read are looked at, as a
    multiple of those that are chosen; 0: all), `closure` (0: none).
    """

    needs_attention = True
    needs_pairs = False
    at_layer_0 = True
    defaults: ClassVar[Mapping[str, Any]] = {"layers": "1", "reduce": "last", "candidates": 3.0, "closure": 0.0}

    def candidates(self, ratio: float) -> float | None:
        """See `Selector.candidates`."""
        return min(1.0, self.options["candidates"] * ratio) or None

    def score(self, view: TokenView) -> Tensor:
        """Attention from the question times the missing part at layer 0, `[batch, tokens]`; before it, the first."""
        read = self._read(view) if view.earlier is None else view.earlier
        if not view.in_layer:
            return read
        missing, given = self._missing(view, read)
        return (read if given is None else read + self.options["closure"] * view.take(given)) * missing

    def _read(self, view: TokenView) -> Tensor:
        """Attention that each token gets from the question, `[batch, tokens]`."""
        layers = layer_numbers(self.options["layers"], view.num_layers)
        reduce = self.choice("reduce", ("last", "mean", "l2", "max"))
        found: list[Tensor] = []

        def hear(layer: int, seen: Attention, weights: Tensor) -> None:
            found.append(received(seen, weights, view.is_question(seen.columns), reduce))

        view.probe(hear, layers, None)
        return view.take(found[0] if len(found) == 1 else torch.stack(found).mean(dim=0))

    def _missing(self, view: TokenView, read: Tensor) -> tuple[Tensor, Tensor | None]:
        """How far each token's output at layer 0 is from that of its chunk alone, and what the read tokens look at."""
        seen = view.attention()
        missing = torch.zeros_like(read)
        given = read.new_zeros(read.shape[0], seen.keys.shape[2] - seen.past) if self.options["closure"] else None
        for rows in seen.blocks():
            weights = seen.weights(rows)
            alone = weights * self._own(view, seen, rows)[:, None]
            alone = alone / alone.sum(dim=-1, keepdim=True).clamp_min(1e-20)
            missing[:, rows] = (seen.outputs(weights) - seen.outputs(alone)).square().sum(dim=(1, 3)).sqrt()
            if given is not None:
                given += (weights.mean(dim=1) * (read * view.reusable)[:, rows, None]).sum(dim=1)[:, seen.past :]
        return missing, given

    @staticmethod
    def _own(view: TokenView, seen: Attention, rows: slice) -> Tensor:
        """`[batch, rows, keys]`: the row's own chunk, and the first key of all."""
        inside = view.same_chunk(rows, seen.keys.shape[2] - seen.past)
        own = torch.cat((inside.new_zeros(*inside.shape[:2], seen.past), inside), dim=2)
        return own.scatter(2, seen.first_key()[:, None, None].expand(-1, own.shape[1], 1), True)
