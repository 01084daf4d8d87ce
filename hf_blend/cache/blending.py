# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The blended forwards of one cache.

`ModelTraits` is what is read of the model once, `ForwardPlanning` finds the chunks of each forward, and a
`BlendedForward` lasts from the model's first hook to its last.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn
from transformers.cache_utils import Cache

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import EXTENDED, decoder_layers, refuse_extended, text_config
from ..model.calibrate import ensure_trusted, ignores_states
from ..model.extras import extras_of
from ..model.flops import layer_costs
from ..model.identity.canonical import refuse_request_state
from ..model.modality import placeholders_of, refuse_placeholders
from ..prefill import notices
from ..prefill.blend import Prefill
from ..prefill.context import PrefillContext
from ..prefill.observing import AttentionObserver, run_probe
from ..prefill.plan import ChunkOrigin, Plan, Planner
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..prefill.request import PendingPrompt, Request
from ..selectors.base import Receive
from .healable import Obstacle


class ModelTraits:
    """What blending and its refusals need to know of a model."""

    def __init__(
        self,
        model: nn.Module,
        chunk_prefix_ids: Sequence[int],
        make_cache: Callable[..., Any],
        allow_unverified: bool,
    ) -> None:
        """Read a model; at its first use test that it can be blended.

        Raises:
            UnsupportedModelError: it cannot be blended exactly, and `allow_unverified` is False.
            PromptError: `chunk_prefix_ids` holds a token that stands for something else than text.
        """
        self.layers, self.config = decoder_layers(model), text_config(model)  # the config is the text decoder's
        self.placeholders = placeholders_of(model)  # ids of tokens that stand for something else than text
        refuse_placeholders(model, chunk_prefix_ids, "chunk_prefix_ids", self.placeholders)
        self.styles = ensure_trusted(model, make_cache, allow_unverified)  # how each layer rotates its keys
        self.extras = extras_of(model, len(self.layers))
        self.ignores_states = ignores_states(model)  # wherever several tokens come at a time

    def refuse_tokens(self, width: int, past: int) -> None:
        """Raise ConfigError if the model would compute `width` new tokens as if no `past` ones were cached."""
        if self.ignores_states and width > 1 and past:
            raise ConfigError(
                f"{width} tokens came behind the {past} that the cache holds, but the code of "
                f"{self.config.model_type} models takes the states of tokens before into account only "
                "where one token comes at a time. reset() the cache and pass the whole conversation in one prompt, "
                "without prefill_chunk_size."
            )


class ForwardPlanning:
    """Plans the forwards of one cache, by its settings."""

    def __init__(self, config: BlendConfig, recipe: str) -> None:
        """Load the plugins that the settings name; `recipe` says in words where the settings come from."""
        self.selector = plugins.load("selectors", config.selector)(config.selector_options, seed=config.seed)
        self._recipe = recipe
        self._check_ms = 0.0  # until a report says it

    def checked_since(self, began_s: float) -> None:
        """Add the time since `began_s`, in which the model was checked, to the next report's `check_ms`."""
        self._check_ms += 1e3 * (time.perf_counter() - began_s)

    def plan(self, cache: Any, request: Request) -> Plan:
        """Find the chunks of a forward and compute missing ones; writes the cache's `report` and `prompts`."""
        began_s, prompts, expected = time.perf_counter(), cache.prompts, cache.prompts.pending
        refuse_request_state(cache.model, cache.traits.layers)
        if EXTENDED.get():  # some model is inside `self_extend`
            refuse_extended(cache.model)
        identity = cache.turns.claim(cache.model, request.past).fingerprint
        self.checked_since(began_s)
        if not expected.batch:
            prompts.tokenizer = ""
            if cache.config.chunk_prefix_ids is None:
                cache.chunk_prefix_ids = cache.store.stored_prefix(cache.model, identity)
        if expected.is_begun:
            report = copy.copy(cache.report)  # the old one comes back after a failure
        else:
            report = BlendReport(past_tokens=request.past, _costs=layer_costs(cache.model))
        origin = ChunkOrigin(tuple(cache.chunk_prefix_ids), prompts.tokenizer, cache.traits.placeholders)
        planner = Planner(cache.model, cache.store, identity, origin, cache.config, report)
        rows, pending = expected.rows(request)
        plan = planner.plan(rows, request.width, request.logits_rows, request.length)
        cache.report, prompts.pending = report, pending
        prompts.beginnings = tuple(ids[: plan.in_order] for ids in prompts.beginnings)
        if not expected.is_begun:
            report.recipe = self._recipe
            report.nominal_ratio = plan.config.nominal_ratio(len(cache.kv.all))
        report.check_ms += self._check_ms
        self._check_ms = 0.0
        if plan.advice is not None:
            report.advice = asdict(plan.advice)
        texts = [notices.OTHER_IDS] if expected.batch and pending.is_other else []
        if prompts.notice and expected.batch and not expected.is_begun:
            texts.append(prompts.notice)
        _report_mismatches(cache, plan, identity, texts)
        return plan


class BlendedForward:
    """One blended forward of a cache: made when it begins, dropped when it ends."""

    def __init__(self, cache: Any, plan: Plan, request: Request, pending: PendingPrompt, report: BlendReport) -> None:
        """Begin a forward by a plan; after a failure `pending` and `report` are the cache's again.

        Raises:
            ConfigError: of the cached tokens some layers loaded a part only.
        """
        if cache.kv.are_partial:
            raise ConfigError(
                f"a prompt came behind {request.past} tokens of which some layers loaded a part only, but it would "
                "attend to all of them. reset() the cache and pass the whole conversation, or open the store without "
                "partial."
            )
        self._cache, self._kv, self._pending, self._report = cache, cache.kv, pending, report
        realigner = Realigner(cache.traits.styles, cache.report, plan.chunks)
        cache.loader = cache.store.loader(cache)
        if cache.loader is not None:
            cache.loader.realigner = realigner
        planning, traits = cache.planning, cache.traits
        context = PrefillContext(
            cache.model, self._kv.all, request, plan, cache.report, realigner, planning.selector,
            self._probe, traits.extras, cache.observer, cache.loader,
        )  # fmt: skip
        self._snapshots = self._kv.snapshots()
        frontier, self._obstacles = self._kv.frontier, {*self._kv.frontier.obstacles}
        if request.may_be_padded(pending.cached):
            frontier.obstacles.add(Obstacle.PADDING)
        if first := [placed.start for placed in plan.chunks if not placed.exact]:
            frontier.blend(request.past + min(first))
        self.prefill: Any = Prefill(context)  # what hooks and cache call; while a probe runs, the probe's own

    def end(self, failed: bool) -> None:
        """Settle the layers; after a failure the cache is as it was before."""
        cache = self._cache
        self.prefill.end()
        self.prefill = None  # it holds this object by its probe
        if cache.loader is not None:
            cache.report.partial = vars(cache.loader.report)
        if failed:
            self._kv.restore(self._snapshots)
            self._kv.frontier.crop(Cache.get_seq_length(cache))
            self._kv.frontier.obstacles = self._obstacles
            cache.prompts.pending, cache.report = self._pending, self._report

    def _probe(self, receive: Receive, layers: Sequence[int], rows: int | None = None) -> None:
        """Run the question alone, in the middle of the forward."""
        cache, prefill, kv_layers = self._cache, self.prefill, self._kv.of_tokens
        request = prefill.context.request
        pairs = zip(kv_layers, self._snapshots, strict=True)
        suspended = [layer.suspend(snapshot, request.past) for layer, snapshot in pairs]
        self.prefill = probe = prefill.probe(
            AttentionObserver(receive, layers, rows), lambda: self._kv.spare(self._snapshots)
        )
        try:
            with cache.watch.hooks.inside():
                plan = probe.context.plan
                is_plain = len(plan.counts) == 1 and not plan.has_padding and not request.past
                run_probe(cache.model, cache, request, is_plain)
        finally:
            self.prefill = prefill
            prefill.take_over(probe)
            for layer, states in zip(kv_layers, suspended, strict=True):
                layer.resume(states)


def _report_mismatches(cache: Any, plan: Plan, identity: str, texts: list[str]) -> None:
    """Warn, and write to the report, where the prompt fits neither the store nor the expected prompt.

    Sets `report.fallback_reason` where nothing of a whole prompt is reused.
    """
    report, tokenizer = cache.report, cache.prompts.tokenizer
    if tokenizer and (others := plan.tokenizers - {tokenizer}):
        texts.append(notices.other_tokenizers(others, tokenizer))
    if plan.kept_ratio < 1:
        texts.append(notices.too_small(plan.kept_ratio))
    if plan.uneven_chunks:
        texts.append(notices.UNEVEN)
    for text in texts:
        notices.warn_once(text)
    report.notice = " ".join(filter(None, (report.notice, *texts)))
    is_complete, used = not cache.prompts.pending.is_begun, report.reusable_tokens + report.exact_tokens
    if is_complete and not used and not report.past_tokens:
        reason = notices.UNEVEN if plan.uneven_chunks else ""
        reason = reason or notices.why_nothing_found(cache.store, identity, tuple(cache.chunk_prefix_ids), tokenizer)
        report.fallback_reason = reason
        if reason:
            notices.warn_once(notices.NOTHING_REUSED + reason)
