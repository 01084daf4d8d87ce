# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The step "select": when tokens are selected, what the selector sees of them, and which it gets."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PromptError
from ..model.capture import Capture, capture, capture_forward
from ..selectors.base import KV, TokenView
from .rows import Rows, highest

if TYPE_CHECKING:
    from .blend import PrefillContext


class Selection:
    """Asks a selector on behalf of one forward."""

    def __init__(self, context: "PrefillContext", with_keys: Sequence[int]) -> None:
        """Prepare for one forward, some of whose layers keep K and V; a selector counts these only."""
        self._with_keys = with_keys
        self._context, self._selector, self._plan = context, context.selector, context.plan
        self._realigner, self._report = context.realigner, context.report
        self._first_scores: Tensor | None = None
        self._is_first = True
        one = context.selector
        self._sees_layers = one.needs_kv or one.needs_full_prefill

    def schedule(self, stateful: Sequence[int]) -> tuple[float | None, dict[int, float]]:
        """The share of the reusable tokens that is computed from the first layer on, and from which later ones on.

        A selector that needs no K and V selects before the first layer, with the first check layer's ratio, and again
        at the later check layers. If nothing is to be selected at all, that is settled before the first layer too. A
        check layer that keeps nothing to compare is moved to the next one that does: `stateful` are those that do.
        """
        before, found = None, dict[int, float]()
        ratios = self._context.config.ratios(len(self._context.layers))
        if self._context.is_probe or not self._selector.count(max(ratios.values()), self._plan.real.numel()):
            return 0.0, {}
        if not self._sees_layers:
            before = ratios.pop(min(ratios))
        for layer, ratio in sorted(ratios.items()):
            index = next((index for index in stateful if index >= layer), None)
            if index is not None:
                found[index] = ratio
        return before, found

    def select(self, index: int, rows: Rows, fresh: KV | None, ratio: float) -> tuple[Tensor, list[int]]:
        """Select the tokens that are computed from a layer on; gives how many there are in each batch entry, too.

        Shapes: fresh `[batch, kv_heads, tokens, head_dim]` → `[batch, rows]`.
        """
        started = time.perf_counter()
        counts = [self._selector.count(ratio, tokens) for tokens in self._plan.stored_counts]
        view = self._view(index, rows, fresh if self._first_scores is None else None)
        if not any(counts):
            scores = torch.zeros_like(view.reusable, dtype=torch.float32)
        elif self._first_scores is not None:
            scores = rows.take(self._first_scores)
        else:
            scores = self._selector.score(view)
            self._first_scores = None if self._sees_layers else scores
        selected = highest(scores.to(view.reusable.device), view.reusable, counts)
        if self._is_first:
            self._report._chosen.append((rows.columns, selected, self._context.request.past))
            self._is_first = False
        self._report.select_ms += 1e3 * (time.perf_counter() - started)
        return selected, counts

    def _view(self, index: int, rows: Rows, fresh: KV | None) -> TokenView:
        table = self._plan.token_table()
        kinds = table if rows.is_all else table.gather(2, rows.columns.expand(4, *rows.columns.shape))
        chunk, offset, tokens, image = kinds
        chunk = chunk if rows.filler is None else chunk.masked_fill(rows.filler, -1)
        given: dict[str, Any] = {"probe": self._context.probe} if self._selector.needs_question else {}
        if fresh is not None:

            def stored_at(layer: int) -> KV:
                number = self._with_keys[layer]
                return rows.take_pair((self._stored(number, fresh, 0), self._stored(number, fresh, 1)))

            given |= {
                "pair": lambda part: rows.take_pair((fresh[part], self._stored(index, fresh, part))),
                "full_prefill": lambda: [rows.take_pair(states) for states in self._full_prefill()],
                "stored_at": stored_at,
            }
        return TokenView(
            index,
            rows.columns,
            chunk >= 0,
            chunk,
            offset,
            tokens,
            stored_alone=lambda layer: rows.take_pair(self._alone(self._with_keys[layer])),
            num_layers=len(self._with_keys),
            images=image > 0,
            **given,
        )

    def _stored(self, index: int, states: KV, part: int) -> Tensor:
        """A copy of K (0) or V (1) of all new tokens with the stored chunks over it, realigned; or of projections."""
        chunks = [placed for placed in self._plan.chunks if not placed.exact]
        layout = self._plan.chunks[0].chunk.layout.layers[index]
        if len(layout) == 1:
            projections = states[part].clone()
            self._realigner.write_beside(index, chunks, projections)
            return projections
        (heads, width, dtype), given = layout[part], states[part]
        form = (given.shape[0], heads, given.shape[2], width)
        filled = given.clone() if given.shape == form else given.new_zeros(form, dtype=dtype)
        self._realigner.write(index, chunks, filled, first=part)
        return filled

    def _alone(self, layer: int) -> KV:
        """K and V of all new tokens as they are stored, zero elsewhere."""
        batch, tokens = self._plan.real.shape
        like = self._plan.chunks[0].states(layer)
        keys, values = (part.new_zeros(batch, part.shape[0], tokens, part.shape[2]) for part in like)
        for placed in self._plan.chunks:
            keys[placed.row, :, placed.columns], values[placed.row, :, placed.columns] = placed.states(layer)
        return keys.to(self._plan.real.device), values.to(self._plan.real.device)

    def _full_prefill(self) -> list[KV]:
        """K and V of all new tokens as a full prefill of the model computes them; what the oracle looks at."""
        self._report.full_prefills += 1
        truth = full_prefill(self._context)
        for layer, table in enumerate(truth.tables):
            self._realigner.tables.setdefault(layer, table)
        pairs, past = [truth.layers[index][:2] for index in self._with_keys], self._context.request.past
        return [(keys[:, :, past:], values[:, :, past:]) for keys, values in pairs]


def full_prefill(context: "PrefillContext") -> Capture:
    """K, V and rotary tables of a full prefill, for research; only for a prompt that begins the cache."""
    request = context.request
    if request.past:
        raise PromptError(
            f"the selector {context.config.selector!r} runs a full prefill of the whole prompt, but {request.past} "
            "tokens are in the cache already and their ids are not known. Use it on a fresh cache."
        )
    if request.others:
        return capture_forward(context.model, request.arguments)[0]
    mask = request.mask
    positions = None if mask is None else (mask.long().cumsum(-1) - 1).clamp_min(0)
    return capture(context.model, request.ids, positions, mask)
