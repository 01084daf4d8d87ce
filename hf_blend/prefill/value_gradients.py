# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much the next token depends on each stored value, by a backward pass of the question.

The question runs over the stored K and V as in a probe, then back from the log probability of its likeliest next
token. Nothing of the model's parameters is differentiated, and stored K and V are no part of the graph: each layer's
attention is one node of it, which sees in its backward pass what its values contribute.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..selectors.attention import Attention
from ..selectors.base import KV
from .observing import AttentionObserver, decoder_output
from .request import Request

SCALE = 256.0  # of the outcome: float16 has no smaller numbers than 6e-8, and only the order of the tokens counts


class ValueGradients(AttentionObserver):
    """Attends as the layers do, and notes in the backward pass how much the outcome depends on each value."""

    def __init__(self, rows: int, layers: int) -> None:
        """Prepare for a probe of no more than `rows` of the question's rows, through so many layers."""
        super().__init__(lambda *_: None, rows=rows)
        self._first = layers // 3  # the values of layers below it hardly matter: they are not asked
        self._asked = layers - self._first
        self.passes = 1 + self._asked / layers
        self._fresh: KV | None = None  # K and V of the rows, in the graph, of the layer that runs
        self._root = torch.zeros((), requires_grad=True)  # on which every layer's output depends
        self._contributions: list[Tensor] = []

    @staticmethod
    def refuses(model: nn.Module, layers: Sequence[Any], kinds: Sequence[Any]) -> bool:
        """Whether the layers cannot be differentiated, or what they hold would not be there for the way back."""
        holds = all(getattr(layer, "keeps_all", False) or getattr(layer, "is_sliding", False) for layer in layers)
        plain = all(kind.has_keys and not kind.has_hooks for kind in kinds)
        moves = {"cpu", "disk"} & {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        return not (holds and plain) or bool(moves) or torch.is_inference_mode_enabled()

    def detached(self, keys: Tensor, values: Tensor) -> KV:
        """K and V of the rows as the cache keeps them; those of the graph wait for the layer's attention."""
        self._fresh = keys, values
        return keys.detach(), values.detach()

    def takes(self, index: int) -> bool:
        """Every layer's attention is taken."""
        return True

    def take(self, index: int, attended: Attention) -> tuple[Tensor, None]:
        """Give what the layer's attention gives, `[batch, rows, heads, value_dim]`, as a node of the graph."""
        fresh, self._fresh = self._fresh, None
        expected = attended.queries.shape[2], attended.keys.shape[1], attended.keys.shape[3], attended.values.shape[3]
        if fresh is None or expected != (fresh[0].shape[2], fresh[0].shape[1], fresh[0].shape[3], fresh[1].shape[3]):
            fresh = (
                attended.keys[:, :, :0],
                attended.values[:, :, :0],
            )  # the layer keeps something else than it attends to
        hidden = self._hidden(attended, self.computed)
        if index < self._first:
            plain = replace(attended, charge=None)
            outputs = plain.outputs(plain.weights(slice(None), hidden))
            return outputs.to(attended.queries.dtype).transpose(1, 2).contiguous(), None
        root = self._root.to(attended.queries.device)
        outputs = _Attend.apply(attended.queries, *fresh, root, attended, hidden, self._contributions)
        return outputs.to(attended.queries.dtype).transpose(1, 2).contiguous(), None

    def run(self, model: nn.Module, cache: Any, request: Request, is_plain: bool) -> None:
        """Run the question forth and back."""
        with torch.enable_grad():
            last = decoder_output(model, cache, request, is_plain).last_hidden_state[:, -1]
            head = model.get_output_embeddings()
            outcome = torch.log_softmax(head(last).float(), dim=-1).amax(dim=-1).sum() * SCALE
            torch.autograd.grad(outcome, self._root, allow_unused=True)

    def scores(self) -> Tensor | None:
        """`[batch, columns]` float32: length of each value times that of its gradient, summed over layers and heads.

        None where some layer did not attend by transformers' AttentionInterface.
        """
        if len(self._contributions) != self._asked:
            return None
        return torch.stack([own.to(self._contributions[0].device) for own in self._contributions]).sum(dim=0)


class _Attend(torch.autograd.Function):
    """Attention of some rows over K and V of a cache, of which those of the rows belong to the graph.

    The derivative of a softcap is taken as 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        root: Tensor,
        attended: Attention,
        hidden: Tensor | None,
        contributions: list[Tensor],
    ) -> Tensor:
        ctx.attended, ctx.hidden, ctx.contributions, ctx.fresh = attended, hidden, contributions, keys.shape[2]
        attended = replace(attended, charge=None)  # what the layer does in any case
        return attended.outputs(attended.weights(slice(None), hidden))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        attended: Attention = ctx.attended
        keys, values, past = attended.keys, attended.values, attended.past
        batch, heads, rows, width = attended.queries.shape
        by_kv_head = batch, keys.shape[1], -1
        weights = attended.weights(slice(None), ctx.hidden).reshape(
            *by_kv_head, keys.shape[2]
        )  # made again: it is large
        arriving = gradients[0].reshape(*by_kv_head, values.shape[3])
        of_values = weights.to(arriving.dtype).transpose(2, 3) @ arriving
        lengths = [torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32) for states in (of_values, values)]
        ctx.contributions.append((lengths[0] * lengths[1]).sum(dim=1)[:, past:])
        of_weights = (arriving @ values.transpose(2, 3)).float()
        of_scores = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True)) * attended.scaling
        of_queries = (of_scores.to(keys.dtype) @ keys).view(batch, heads, rows, width)
        attended._charge(lambda: weights.new_ones(()).expand(1, 1, rows, keys.shape[2]), 2 * values.shape[3] + width)
        if not ctx.fresh:
            return of_queries, None, None, None, None, None, None
        places = (attended.columns + past)[:, None, :]
        first = torch.ones_like(attended.columns, dtype=torch.bool)
        first[:, 1:] = attended.columns[:, 1:] != attended.columns[:, :-1]  # a repeated row has its K and V once
        own = of_scores.gather(3, places[:, :, None].expand(*of_scores.shape[:3], -1)) * first[:, None, None]
        of_keys = own.to(keys.dtype).transpose(2, 3) @ attended.queries.reshape(*by_kv_head, width)
        own_values = of_values.gather(2, places[..., None].expand(batch, of_values.shape[1], -1, of_values.shape[3]))
        return of_queries, of_keys, own_values * first[:, None, :, None], None, None, None, None
