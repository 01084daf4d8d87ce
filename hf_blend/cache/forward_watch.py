# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How a cache notices the forwards of its model, and what becomes of each.

transformers does not tell a cache that a forward begins or ends. The cache sees these calls, in this order:

1. `generate` asks for the length. Where chunks may be reused, a hook is put on the model: WATCHED.
2. `generate` asks for mask sizes, only if it makes the masks before it calls the model.
3. The hook announces the forward with all of its arguments: BLENDED if stored chunks are reused, else PLAIN.
4. The model asks for length and mask sizes.
5. Each layer hands over its K and V (`update`). In the state PLAIN the first layer ends it: IDLE.
6. After the model, its hook ends BLENDED, also after an exception: IDLE.

A decoding step has no hook: only 5 shows it. Where a prompt comes in several forwards (`prefill_chunk_size`), the
state between them is WATCHED instead of IDLE.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..errors import ConfigError, HfBlendError
from ..model.anatomy import EXTENDED, is_extended
from ..model.hooks import ForwardHooks, is_assisting
from ..prefill.notices import NOTHING_REUSED, warn_once
from ..prefill.plan import Plan
from ..prefill.report import Advice, BlendReport
from ..prefill.request import PendingPrompt, Request
from .blending import BlendedForward
from .healable import Obstacle


class State(Enum):
    """What is known of the model's next forward, or of the one that runs."""

    IDLE = auto()  # the next forward shows itself by its first layer
    WATCHED = auto()  # a hook will announce the next forward
    PLAIN = auto()  # a forward is announced that computes all of its tokens; none of its layers has come
    BLENDED = auto()  # a forward runs that reuses stored chunks


class ForwardWatch:
    """Notices the forwards that carry one cache. It goes with the cache, and does not keep it alive."""

    def __init__(self, cache: Any, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._cache: Callable[[], Any] = weakref.ref(cache)
        self.hooks = ForwardHooks(cache, model, layers, listener=self)
        self.state = State.IDLE
        self.blended: BlendedForward | None = None  # the forward that runs, in the state BLENDED
        self._last_layer = len(layers)  # that handed over K and V
        self._masked_tokens = 0  # for which `generate` made masks before it called the model
        self._advice: tuple[Advice, float] | None = None  # of the store's controller, and when its forward began

    @property
    def prefill(self) -> Any:
        """What the hooks in the layers call; None if no blended forward runs."""
        return None if self.blended is None else self.blended.prefill

    def watch_model(self) -> None:
        """A forward is expected in which chunks may be reused: see it before its first layer."""
        self.hooks.watch_model()
        if self.state is State.IDLE:
            self.state = State.WATCHED

    def mask_is_made(self, tokens: int) -> None:
        """Mask sizes for new tokens were asked for: by `generate` before it calls the model, or by the model."""
        self._masked_tokens = tokens if self.state in (State.IDLE, State.WATCHED) else 0

    def forward_begins(self, arguments: dict[str, Any]) -> None:
        """The hook on the model announces a forward, with its arguments by name."""
        began_s, cache = time.perf_counter(), self._cache()
        self.take_back()
        prompts, past = cache.prompts, Cache.get_seq_length(cache)
        masked_tokens, self._masked_tokens, self.state = self._masked_tokens, 0, State.PLAIN
        request = Request.parse(arguments, cache.model, past, prompts.pending, masked_tokens)
        cache.traits.refuse_tokens(request.width, past)
        if not request.rows or request.fallback_reason:
            self._compute_all(request)
            self.hooks.leave()
            return
        self._advice = None
        before = prompts.pending, cache.report
        plan = cache.planning.plan(cache, request)
        if prompts.pending.is_other:
            prompts.note_unexpected(request)
        if not plan.chunks:
            if request.may_be_padded(before[0].cached):
                cache.kv.frontier.obstacles.add(Obstacle.PADDING)
            self.hooks.leave(watching=prompts.pending.is_begun)
            return
        self.blend(plan, request, *before)
        self._advice = None if plan.advice is None or plan.computed else (plan.advice, began_s)

    def blend(self, plan: Plan, request: Request, pending: PendingPrompt, report: BlendReport) -> None:
        """Enter the layers for a forward by a plan; after a failure `pending` and `report` are the cache's again."""
        self.blended, self.state = BlendedForward(self._cache(), plan, request, pending, report), State.BLENDED
        self.hooks.enter_layers(request.width)

    def layer_updates(self, index: int, keys: Tensor) -> None:
        """A layer hands over its keys, `[batch, kv_heads, new, head_dim]`, in a forward that is not blended."""
        is_first, self._last_layer = index <= self._last_layer, index  # the first need not be 0: some keep no K and V
        if not is_first:
            return
        cache, is_announced = self._cache(), self.state is State.PLAIN
        try:
            if tokens := self.take_back():
                raise ConfigError(
                    f"the last forward ended between two layers: {tokens} tokens had come to some of them, but to all "
                    "is expected. They are taken back. Call the model again."
                )
            is_own = is_announced or self.hooks.check_caller()
            if is_own and not is_announced:
                past = Cache.get_seq_length(cache)
                cache.traits.refuse_tokens(keys.shape[2], past)
                self._compute_all(Request.unseen(keys, past))
        except HfBlendError:
            self._rest(watching=cache.is_expecting)
            raise
        if EXTENDED.get() and is_extended(cache.model):
            cache.kv.frontier.obstacles.add(Obstacle.EXTENDED)
        if self._advice is not None:  # the next step: a device has answered by now
            advice, began_s = self._advice
            cache.store.controller.observe(advice, time.perf_counter() - began_s)
            self._advice = None
        if is_own:
            self._rest(watching=cache.prompts.pending.is_begun)

    def forward_ends(self, failed: bool = False) -> None:
        """A blended forward has ended, or one that was announced has failed; then the cache is as it was before."""
        prompts = self._cache().prompts
        if failed:
            self._advice = None
        if self.blended is not None:
            self.blended.end(failed)
            self.blended = None
        self._rest(watching=prompts.pending.is_begun and not failed)

    def take_back(self) -> int:
        """Take back what a forward left that ended between two layers; returns how many tokens.

        Raises ConfigError where a window or a state has moved on.
        """
        cache = self._cache()
        if tokens := cache.kv.take_back():
            length, frontier = Cache.get_seq_length(cache), cache.kv.frontier
            cache.prompts.crop(length + tokens, length, Obstacle.PADDING in frontier.obstacles)
            frontier.crop(length)
        return tokens

    def stop(self) -> None:
        """The cache is emptied: undo a forward that was interrupted, and expect none."""
        if self.blended is not None:
            self.forward_ends(failed=True)
        self._rest(watching=False)

    def _rest(self, watching: bool) -> None:
        """No forward runs; the next one is watched, or not."""
        self.hooks.leave(watching=watching)
        self.state = State.WATCHED if watching else State.IDLE

    def _compute_all(self, request: Request) -> None:
        """A forward computes every token: note its author and ids, expect no prompt, report why nothing is reused."""
        cache, reason = self._cache(), request.fallback_reason
        prompts, turns = cache.prompts, cache.turns
        is_begun = prompts.pending.is_begun
        if request.may_be_padded(prompts.pending.cached):
            cache.kv.frontier.obstacles.add(Obstacle.PADDING)
        is_reported = bool(reason and (prompts.pending.batch or not request.past))
        if turns.is_new or not request.past or (request.width > 1 and not is_assisting()):
            turns.claim(cache.model, request.past)
        if request.width > 1 or not request.past:
            prompts.note_unexpected(request)
        else:
            prompts.note_step(request)
        if is_reported and not is_begun:
            notice = prompts.notice if prompts.pending.batch else ""
            cache.report = BlendReport(cache.config.recompute_ratio, past_tokens=request.past, notice=notice)
        if is_reported:
            cache.report.fallback_reason = reason
            warn_once(NOTHING_REUSED + reason)
        if is_reported or is_begun:
            cache.report.prompt_tokens += request.real_tokens()
        prompts.pending = PendingPrompt()
