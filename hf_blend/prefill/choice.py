# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Choosing tokens at a layer: what the selector is shown, how many it may have, and which it gets."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..config import BlendConfig
from ..errors import PromptError
from ..model.capture import Capture, capture, capture_forward
from ..selectors.attention import Attention
from ..selectors.base import KV, Hear, Selector, TokenView
from .context import PrefillContext
from .rows import Rows, highest


@dataclass(frozen=True)
class FullPrefill:
    """K, V and rotary tables of a full prefill, for research; only for a prompt that starts the cache."""

    model: nn.Module
    selector: str
    ids: Tensor
    mask: Tensor | None
    past: int
    arguments: Mapping[str, Any] | None = None

    def __call__(self) -> Capture:
        """Run it."""
        if self.past:
            raise PromptError(
                f"the selector {self.selector!r} runs a full prefill of the whole prompt, but {self.past} tokens are "
                "in the cache already and their ids are not known. Use it on a fresh cache."
            )
        if self.arguments is not None:
            return capture_forward(self.model, self.arguments)[0]
        positions = None if self.mask is None else (self.mask.long().cumsum(-1) - 1).clamp_min(0)
        return capture(self.model, self.ids, positions, self.mask)


class Chooser:
    """Asks a selector on behalf of one forward."""

    def __init__(
        self,
        selector: Selector,
        context: PrefillContext,
        truth: Callable[[], Capture],
        probe: Callable[[Hear, Sequence[int], Tensor | None], None],
    ) -> None:
        """Prepare for one forward."""
        self._selector, self._plan, self._past = selector, context.plan, context.past
        self._realigner, self._report, self._truth = context.realigner, context.report, truth
        self._probe = probe
        self._table: tuple[int, Tensor] | None = None
        self._first_scores: Tensor | None = None
        self._asked_before = False  # those scores are of a selector that has yet to see layer 0
        self._is_first = True

    def schedule(self, config: BlendConfig, num_layers: int, tokens: int) -> tuple[float | None, dict[int, float]]:
        """When tokens are chosen, and how many.

        A selector that needs no K and V chooses before the first layer, with the first check layer's ratio, and again
        at the later check layers; so does one that chooses at layer 0, from what it sees there. If nothing is to be
        chosen at all, that is settled before the first layer too.
        """
        ratios = config.ratios(num_layers)
        if self._selector.at_layer_0:
            ratios = self._from_layer_0(config, ratios, num_layers)
        if not self._selector.count(max(ratios.values()), tokens):
            return 0.0, {}
        if self._sees_layers:
            return self._selector.candidates(ratios[0]) if 0 in ratios else None, ratios
        first = min(ratios)
        return ratios[first], {layer: ratio for layer, ratio in ratios.items() if layer > first}

    def _from_layer_0(self, config: BlendConfig, ratios: dict[int, float], num_layers: int) -> dict[int, float]:
        """The schedule of a selector that chooses at layer 0 what others choose at the first check layer."""
        is_open = config.layer_ratios is None and not config.gradual and len(ratios) == 1
        own = self._selector.schedule(config.recompute_ratio, num_layers) if is_open else None
        first = min(ratios)
        return own or {0: ratios[first], **{layer: ratio for layer, ratio in ratios.items() if layer > first}}

    @property
    def has_chosen(self) -> bool:
        """Whether the first choice was made; candidates are none yet."""
        return not self._is_first

    @property
    def _sees_layers(self) -> bool:
        """Whether the selector has to see something that is computed in this prompt."""
        one = self._selector
        return one.needs_kv or one.needs_full_prefill or one.needs_attention

    @property
    def needs_attention(self) -> bool:
        """Whether the selector has to see what rows look at."""
        return self._selector.needs_attention

    def wants_attention(self, index: int) -> bool:
        """Whether the selector has to see what the rows look at in a check layer."""
        return self._selector.needs_attention and (index == 0 or not self._selector.at_layer_0)

    def choose(
        self,
        index: int,
        rows: Rows,
        reusable: Tensor,
        fresh: KV | None,
        counts: Sequence[int],
        attention: Attention | None = None,
    ) -> Tensor:
        """Choose the tokens that are recomputed from a layer on.

        Shapes: reusable `[batch, tokens]`, fresh `[batch, kv_heads, tokens, head_dim]` → `[batch, rows]`.
        """
        started = time.perf_counter()
        view = self._view(index, rows, reusable, fresh if self._first_scores is None or self._asked_before else None)
        if attention is not None:
            view = replace(view, attention=lambda: attention)
        scores = self._scores(view, rows) if any(counts) else torch.zeros_like(view.reusable, dtype=torch.float32)
        picked = highest(scores.to(view.reusable.device), view.reusable, counts)
        if self._is_first and not (self._asked_before and fresh is None):  # candidates are no choice yet
            self._report.chose(rows.columns, picked, self._past)
            self._is_first = False
        self._report.select_ms += 1e3 * (time.perf_counter() - started)
        return picked

    def counts(self, ratio: float, reusable: Sequence[int]) -> list[int]:
        """How many tokens are chosen in each batch entry; known before anything is computed."""
        return [self._selector.count(ratio, tokens) for tokens in reusable]

    def _scores(self, view: TokenView, rows: Rows) -> Tensor:
        """Scores of the rows; a selector that scores before the check layers keeps to what it said there."""
        if self._first_scores is not None and not (self._asked_before and view.in_layer):
            return rows.take(self._first_scores)
        earlier = None if self._first_scores is None else rows.take(self._first_scores)
        scores = self._selector.score(replace(view, earlier=earlier))
        self._asked_before = self._selector.at_layer_0 and not view.in_layer
        if self._selector.at_layer_0 or not self._sees_layers:
            self._first_scores = scores if rows.is_all else _spread(scores, view.columns, self._plan.real.shape[1])
        return scores

    def _view(self, index: int, rows: Rows, reusable: Tensor, fresh: KV | None) -> TokenView:
        table = self._tokens(reusable)
        kinds = table if rows.is_all else table.gather(2, rows.columns.expand(4, *rows.columns.shape))
        chunk, offset, tokens, image = kinds
        chunk = chunk if rows.filler is None else chunk.masked_fill(rows.filler, -1)
        view = TokenView(
            index,
            rows.columns,
            chunk >= 0,
            chunk,
            offset,
            tokens,
            stored_alone=lambda layer: rows.take_pair(self._alone(self._with_keys[layer])),
            probe=self._probe,
            num_layers=len(self._with_keys),
            chunks=table[0],
            images=image > 0,
        )
        if fresh is None:
            return view
        pair = lambda part: rows.take_pair((fresh[part], self._stored(index, fresh, part)))  # noqa: E731
        view = replace(
            view,
            in_layer=True,
            pairs=pair,
            full_prefill=lambda: [rows.take_pair(states) for states in self._full_prefill()],
            stored_at=self._stored_at(rows, fresh),
        )
        if not self._selector.needs_pairs:
            return view
        (fresh_keys, keys), (fresh_values, values) = pair(0), pair(1)
        return replace(view, fresh=(fresh_keys, fresh_values), stored=(keys, values))

    def _tokens(self, reusable: Tensor) -> Tensor:
        """`[4, batch, tokens]`: see `Plan.token_table`; made once, and again after a chunk was refused."""
        known = len(self._plan.slots)
        if self._table is None or self._table[0] != known:
            table = self._plan.token_table().to(reusable.device)
            table[0].masked_fill_(~reusable, -1)
            self._table = known, table
        return self._table[1]

    @cached_property
    def _with_keys(self) -> list[int]:
        """The layers that keep K and V; a selector counts these only."""
        return [index for index, states in enumerate(self._plan.slots[0].chunk.layout.layers) if len(states) > 1]

    def _stored_at(self, rows: Rows, fresh: KV) -> Callable[[int], KV]:
        """Gives the stored K and V of the rows in one of the layers that keep them."""

        def stored(layer: int) -> KV:
            index = self._with_keys[layer]
            return rows.take_pair((self._stored(index, fresh, 0), self._stored(index, fresh, 1)))

        return stored

    def _stored(self, index: int, states: KV, part: int) -> Tensor:
        """A copy of K (0) or V (1) of all new tokens with the stored chunks over it, realigned; or of projections."""
        slots = [slot for slot in self._plan.slots if not slot.exact]
        if len(self._plan.slots[0].chunk.layers[index]) == 1:
            projections = states[part].clone()
            self._realigner.lay_projections(index, slots, projections)
            return projections
        whole = self._like(index, states, part)
        self._realigner.lay_part(index, slots, part, whole)
        return whole

    def _like(self, index: int, states: KV, part: int) -> Tensor:
        """A copy of these states, or zeros where those of a layer have another form."""
        stored, given = self._plan.slots[0].states(index)[part], states[part]
        form = (given.shape[0], stored.shape[0], given.shape[2], stored.shape[2])
        return given.clone() if given.shape == form else given.new_zeros(form, dtype=stored.dtype)

    def _alone(self, layer: int) -> KV:
        """K and V of all new tokens as they are stored, zero elsewhere."""
        batch, tokens = self._plan.real.shape
        like = self._plan.slots[0].states(layer)
        keys, values = (part.new_zeros(batch, part.shape[0], tokens, part.shape[2]) for part in like)
        for slot in self._plan.slots:
            keys[slot.row, :, slot.columns], values[slot.row, :, slot.columns] = slot.states(layer)
        return keys.to(self._plan.real.device), values.to(self._plan.real.device)

    def _full_prefill(self) -> list[KV]:
        """K and V of all new tokens as a full prefill of the model computes them; what the oracle looks at."""
        self._report.full_prefills += 1
        truth = self._truth()
        for layer, table in enumerate(truth.tables):
            self._realigner.learn(layer, table)
        pairs = [truth.layers[index][:2] for index in self._with_keys]
        return [(keys[:, :, self._past :], values[:, :, self._past :]) for keys, values in pairs]


def _spread(scores: Tensor, columns: Tensor, tokens: int) -> Tensor:
    """Scores of some columns, `[batch, rows]`, among all `tokens`, 0 elsewhere."""
    return scores.new_zeros(scores.shape[0], tokens).scatter_(1, columns.to(scores.device), scores)
