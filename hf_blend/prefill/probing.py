# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A pass of the question alone over the stored KV: what it looks at, before anything is recomputed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..model.attention import StopForward
from ..selectors.attention import Attention
from ..selectors.base import Hear


class AttentionObserver:
    """Stands in the place of each layer's attention: tells what is looked at, and attends."""

    def __init__(self, hear: Hear, layers: Sequence[int] | None = None, anchors: Tensor | None = None) -> None:
        """Prepare to listen.

        Shapes: anchors `[batch, columns]`.
        """
        self._hear, self._layers, self._anchors = hear, layers, anchors
        self.last = None if layers is None else layers[-1]

    def hears(self, index: int) -> bool:
        """Whether a layer's attention is taken; the others attend as they do without a listener."""
        return self._layers is None or self._anchors is not None or index in self._layers

    def take(self, index: int, seen: Attention) -> tuple[Tensor, None]:
        """Tell of a layer, then give what its attention gives.

        Shape: `[batch, rows, heads, value_dim]`.
        """
        is_told = self._layers is None or index in self._layers
        if is_told:
            weights = seen.weights(slice(None))
            self._hear(index, seen, weights)
        if index == self.last:
            raise StopForward
        if self._anchors is not None:
            weights = seen.weights(slice(None), self._kept(seen))
        return seen.outputs(weights).to(seen.queries.dtype).transpose(1, 2).contiguous(), None

    def _kept(self, seen: Attention) -> Tensor:
        """`[batch, 1, keys]`: the anchors, and all that is in the cache or has no place among the columns."""
        anchors = self._anchors.to(seen.keys.device)  # type: ignore[union-attr]
        keys = torch.ones(anchors.shape[0], seen.keys.shape[2], dtype=torch.bool, device=anchors.device)
        keys[:, seen.past : seen.past + anchors.shape[1]] = anchors
        return keys[:, None]


def sight(
    columns: Tensor, tokens: int, charge: Callable[[Any], None], take: Callable[[Attention], Any]
) -> Callable[..., Any]:
    """What takes a layer's attention call, makes an `Attention` of its arguments and passes it on.

    Shapes: columns `[batch, rows]`.
    """

    def attend(_: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        is_plain = isinstance(mask, Tensor) and mask.dim() == 4 and not getattr(mask, "is_causal", False)
        plain = mask if is_plain else None
        if given.get("indices") is not None:
            plain = _indexed(mask, given["indices"], key.shape[2])
        scaling = given.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        past = key.shape[2] - tokens
        return take(Attention(query, key, value, columns, past, plain, scaling, given.get("softcap"), charge))

    return attend


def _indexed(mask: Tensor, indices: Tensor, keys: int) -> Tensor:
    """A mask, boolean or additive, that hides all but the keys that an indexer chose, `[batch, rows, chosen]`."""
    chosen = torch.zeros((*indices.shape[:2], keys), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


@torch.no_grad()
def run_probe(
    model: nn.Module, cache: Any, ids: Tensor, mask: Tensor | None, arguments: Mapping[str, Any] | None = None
) -> None:
    """Run the decoder over a prompt of which a cache recomputes nothing but the question.

    Shapes: ids `[batch, tokens]`, mask `[batch, columns]`.
    """
    given = {}
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
        given = {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :]}
    with contextlib.suppress(StopForward):
        if arguments:
            model(**{**arguments, "past_key_values": cache, "use_cache": True})
        else:
            model.get_decoder()(input_ids=ids, past_key_values=cache, use_cache=True, **given)
