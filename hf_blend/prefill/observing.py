# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The attention of a probe, passed on to a selector."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..model.attention import ROWS, StopForward
from ..selectors.attention import Attention
from ..selectors.base import Receive


class AttentionObserver:
    """Replaces each layer's attention function: passes the weights on to a selector, and attends."""

    def __init__(self, receive: Receive, layers: Sequence[int] | None = None, rows: int | None = None) -> None:
        """Prepare to listen to some layers; None to all.

        A probe that listens computes no more than `rows` of the question's rows; no row attends to the others.
        """
        self._receive = receive
        self._layers = layers
        self.rows = rows
        self.computed: Tensor | None = None  # `[batch, columns]`: False on the question's columns that are left out
        self.last = None if layers is None else layers[-1]
        self._masks: list[tuple[Any, Tensor, int, Tensor]] = []  # mask, columns, keys, and what is seen then

    def takes(self, index: int) -> bool:
        """Whether a layer's attention is taken; the others attend by their stock function."""
        return self._layers is None or self.computed is not None or index in self._layers

    def take(self, index: int, attended: Attention) -> tuple[Tensor, None]:
        """Pass a layer's weights on, then return what its attention returns, `[batch, rows, heads, value_dim]`."""
        is_heard = self._layers is None or index in self._layers
        is_last = index == self.last
        # What the layer does in any case is not charged again; in the last one nothing follows
        free = replace(attended, charge=None)
        weights = (attended if is_last else free).weights(self._seen(attended))
        if is_heard:
            self._receive(index, attended, weights)
        if is_last:
            raise StopForward
        return free.outputs(weights).to(attended.queries.dtype).transpose(1, 2).contiguous(), None

    def _seen(self, attended: Attention) -> Tensor | None:
        """Which keys the rows see, if some of the question's columns are left out; None: as in the mask.

        Layers with the same mask and as many keys share it.
        """
        computed = self.computed
        if computed is None:
            return None
        keys = attended.keys.shape[2]
        for mask, columns, count, seen in self._masks:
            if mask is attended.mask and columns is attended.columns and count == keys:
                return seen
        visible = computed.new_ones(len(computed), keys, device=attended.keys.device)
        visible[:, attended.past : attended.past + computed.shape[1]] = computed
        seen = attended.visible() & visible[:, None, None]
        self._masks.append((attended.mask, attended.columns, keys, seen))
        return seen


def attention_of(
    columns: Tensor, tokens: int, charge: Callable[[Any], None], take: Callable[[Attention], Any]
) -> Callable[..., Any]:
    """What takes a layer's call of attention, for rows at `[batch, rows]`, and passes on an `Attention` of it."""

    def attend(_: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        lines = kwargs.get(ROWS)
        seen: Any = mask if isinstance(mask, Tensor) and mask.dim() == 4 else None
        if lines is not None:  # of a causal mask the columns say it
            seen = None if lines.is_causal else lines
        if kwargs.get("indices") is not None:
            seen = _indexed(mask, kwargs["indices"], key.shape[2])
        scaling = kwargs.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        past, own = key.shape[2] - tokens, columns.to(query.device)
        return take(Attention(query, key, value, own, past, seen, scaling, kwargs.get("softcap"), charge))

    return attend


def _indexed(mask: Tensor, indices: Tensor, keys: int) -> Tensor:
    """A mask, boolean or additive, that hides all but the keys that an indexer chose, `[batch, rows, chosen]`."""
    chosen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
