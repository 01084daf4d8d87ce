# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns of a forward have stored K and V, and what the report of the cache says about them."""

import copy
import time
from dataclasses import asdict
from typing import Any

from .. import plugins
from ..config import BlendConfig
from ..model.anatomy import EXTENDED, refuse_extended
from ..model.flops import layer_costs
from ..model.identity.canonical import refuse_request_state
from ..prefill.notices import (
    NOTHING_REUSED,
    OTHER_IDS,
    UNEVEN,
    other_tokenizers,
    too_small,
    warn_once,
    why_nothing_found,
)
from ..prefill.plan import ChunkOrigin, Plan, Planner
from ..prefill.report import BlendReport
from ..prefill.request import Request


class ForwardPlanning:
    """Plans the forwards of one cache, by its settings.

    Attributes:
        selector: chooses the tokens that are recomputed.
        corrector: corrects the K and V of the others.
    """

    def __init__(self, config: BlendConfig, recipe: str) -> None:
        """Load the plugins that the settings name; `recipe` says where the settings are from."""
        self.selector = plugins.load("selectors", config.selector)(config.selector_options, seed=config.seed)
        self.corrector = plugins.load("correctors", config.corrector)(config.corrector_options)
        self._recipe = recipe
        self._check_ms = 0.0  # until a report says it

    def checked_since(self, began_s: float) -> None:
        """Note that the model was checked until now, for the next report."""
        self._check_ms += 1e3 * (time.perf_counter() - began_s)

    def plan(self, cache: Any, request: Request) -> Plan:
        """Plan which columns have stored KV; the report is new, or continues if a prompt comes in parts."""
        began_s, prompts, expected = time.perf_counter(), cache.prompts, cache.prompts.pending
        refuse_request_state(cache.model, cache.traits.layers)
        if EXTENDED.get():  # some model is inside `self_extend`
            refuse_extended(cache.model)
        identity = cache.turns.claim(cache.model, request.past).fingerprint
        self.checked_since(began_s)
        if not expected.batch:
            prompts.tokenizer = ""
            if prompts.images is None and cache.config.chunk_prefix_ids is None:
                cache.chunk_prefix_ids = cache.store.stored_prefix(cache.model, identity)
        if expected.is_begun:
            report = copy.copy(cache.report)  # the old one comes back after a failure
        else:
            report = BlendReport(past_tokens=request.past, _costs=layer_costs(cache.model))
        images = {} if prompts.images is None else prompts.images.alone
        origin = ChunkOrigin(tuple(cache.chunk_prefix_ids), prompts.tokenizer, cache.traits.placeholders, images)
        planner = Planner(cache.model, cache.store, identity, origin, cache.config, report)
        rows, pending = expected.rows(request)
        plan = planner.plan(rows, request.width, request.logits_rows, request.length)
        cache.report, prompts.pending = report, pending
        prompts.beginnings = tuple(ids[: plan.in_order] for ids in prompts.beginnings)
        if not expected.is_begun:
            report.recipe = self._recipe
            report.nominal_ratio = plan.config.nominal_ratio(len(cache.kv.all))
            report.encoded_images = 0 if prompts.images is None else prompts.images.encoded
        report.check_ms += self._check_ms
        self._check_ms = 0.0
        if plan.advice is not None:
            report.advice = asdict(plan.advice)
        notices = [OTHER_IDS] if expected.batch and pending.is_other else []
        if prompts.notice and expected.batch and not expected.is_begun:
            notices.append(prompts.notice)
        _warn(cache, plan, identity, notices)
        return plan


def _warn(cache: Any, plan: Plan, identity: str, notices: list[str]) -> None:
    """Warn, once of each kind, where the prompt does not fit the store or the expected prompt."""
    report, tokenizer = cache.report, cache.prompts.tokenizer
    if tokenizer and (others := plan.tokenizers - {tokenizer}):
        notices.append(other_tokenizers(others, tokenizer))
    if plan.kept_ratio < 1:
        notices.append(too_small(plan.kept_ratio))
    if plan.uneven_chunks:
        notices.append(UNEVEN)
    for notice in notices:
        warn_once(notice)
    report.notice = " ".join(filter(None, (report.notice, *notices)))
    is_complete, used = not cache.prompts.pending.is_begun, report.reusable_tokens + report.exact_tokens
    if is_complete and not used and not report.past_tokens:
        reason = UNEVEN if plan.uneven_chunks else ""
        reason = reason or why_nothing_found(cache.store, identity, tuple(cache.chunk_prefix_ids), tokenizer)
        report.fallback_reason = reason
        if reason:
            warn_once(NOTHING_REUSED + reason)
