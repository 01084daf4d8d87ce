# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The forwards of the model that carry one cache: what becomes of each, from its first hook to its last.

A hook before the model is the only way in: it announces the forward with all of its arguments. If stored chunks can
be reused, a `Prefill` enters the layers. If not, every token is computed, and each layer appends its K and V. A hook
behind the model ends the forward, also after an exception; then the cache is as it was before. Only an interrupt, such
as Ctrl+C, passes both: the columns that it left are removed when the cache is used again.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError, HfBlendError
from ..model.anatomy import EXTENDED, is_extended, layer_costs, refuse_extended
from ..model.hooks import ForwardHooks
from ..model.identity import Author, author_of, refuse_autocast, refuse_other_author
from ..prefill.blend import Prefill
from ..prefill.plan import Plan, Planner
from ..prefill.realign import Realigner
from ..prefill.report import (
    EMPTY,
    NOTHING_REUSED,
    ONE_TOKEN,
    OTHER_IDS,
    UNEVEN,
    BlendReport,
    other_tokenizers,
    too_small,
    warn_once,
    why_nothing_found,
)
from ..prefill.request import PendingPrompt, Request
from ..rotary.base import frequency_regime
from ..selectors.base import Receive
from .chains import link_ends
from .guards import GuardedCache, check_length, refuse
from .state import ASK_AGAIN, BlendState


class CacheForwards:
    """What the hooks in the model call. It lives as long as its cache.

    Attributes:
        is_running: a forward with the cache was announced, and has not ended.
        is_prompt: the last one that was announced brought a prompt, and no step or round of assisted decoding.
        prefill: what the hooks in the layers call while a forward reuses stored chunks; else None.
    """

    def __init__(self, cache: Any, state: BlendState) -> None:
        """Watch a model until the cache is gone."""
        self.state = state
        self.is_running = self.is_prompt = False
        self.prefill: Prefill | None = None  # a `ProbePass` while a probe runs
        # Of the forward that runs: tokens before it, those that it brings, and what is restored if it fails
        self._past = self._width = 0
        self._before = state.pending, state.report
        self._snapshots: list[Any] | None = None  # of the layers, if it has an author
        self.hooks = ForwardHooks(cache, state.model, state.info.layers, listener=self)
        self.hooks.watch_model()

    def forward_begins(self, arguments: dict[str, Any]) -> None:
        """The model is called with the cache, with these arguments by name."""
        began_s = time.perf_counter()
        state = self.state
        self.settle()
        past = state.kv.length
        self._past = past
        self._before = state.pending, state.report
        cache = next(value for value in arguments.values() if isinstance(value, GuardedCache))

        # Is it a prompt, or the tokens of a decoding step?
        ids = arguments.get("input_ids")
        begins_turn = cache.begins_turn
        cache.begins_turn = False
        is_step = ids is not None and ids.shape[1] == 1 and not begins_turn
        is_expected = past > 0 and not is_step and state.pending.expects(ids, past)
        self.is_prompt = not past or begins_turn or is_expected or not (is_step or state.is_recording)
        refuse(
            model=state.model,
            layers=state.info.layers,
            arguments=arguments,
            past=past,
            past_rows=state.kv.batch_size,
            kv=state.kv.all,
            begins_turn=begins_turn,
            is_expected=is_expected,
            advice=ASK_AGAIN,
        )

        # Plan it
        request = Request.parse(arguments, state.model, past, state.pending)
        state.info.refuse_tokens(request.width, past)
        state.regimes.add(frequency_regime(state.info.config, past + request.width))
        if request.rows and not request.fallback_reason:
            self._begin_blended(cache, request, began_s)
        else:
            self._begin_plain(request)
        self._width = request.width
        state.is_inference = state.is_inference or torch.is_inference_mode_enabled()
        state.has_graph = state.has_graph or torch.is_grad_enabled()
        self.is_running = True

    def forward_ends(self, failed: bool = False) -> bool:
        """The model has returned or raised; after a failure the cache is as it was before.

        The device is asked only now, behind the forward's last kernel, whether the weights are what they were taken
        for. Returns True if they are not: the forward was planned for another model, and has to run again.
        """
        state = self.state
        is_other = False
        if self._snapshots is not None and not failed:
            try:
                author = author_of(state.model)
            except HfBlendError:
                self._end(failed=True)
                raise
            is_other = author != state.author
            if is_other and self.prefill is None and not self._past:  # planned for none
                state.author = author
                is_other = False
        self._end(failed or is_other)
        if is_other:
            state.info = state.read_info()  # a structure that was never tested is tested now
        return is_other

    def _end(self, failed: bool) -> None:
        """Leave the model, and after a failure restore the cache."""
        state = self.state
        has_begun = self.is_running
        prefill = self.prefill
        snapshots = self._snapshots
        self.is_running = False
        self._snapshots = None
        self.prefill = None  # refers to this object, to run a probe
        self.hooks.leave()
        if prefill is not None:
            prefill.end()
            if state.loader is not None:
                state.report.partial = state.loader.report
        if not failed:
            if has_begun:
                check_length(state.model, state.kv.length, self._past + self._width)
            return

        # Restore the cache
        state.pending, state.report = self._before
        if snapshots is not None:
            state.kv.restore(snapshots)
            state.tokens.crop(self._past)
        elif has_begun and any(hasattr(layer, "has_only_state") for layer in state.kv.of_tokens):
            if self._past:
                state.is_cut = True  # nobody knows which states have moved on
            else:
                for layer in state.kv.of_tokens:
                    layer.reset()
        try:
            state.rollback_partial_forward()
        except ConfigError:
            return  # the next use of the cache says it
        state.crop_tokens(state.kv.length)

    def stop(self) -> None:
        """Undo a forward that was interrupted, as by Ctrl+C, behind which torch calls no hook."""
        if self.is_running or self._snapshots is not None:
            self._end(failed=True)

    def settle(self) -> None:
        """Undo a forward that was interrupted, and leave inference mode with all K and V if it is over.

        Raises ConfigError where a window or a state has advanced behind the forward.
        """
        state = self.state
        if self.is_running or self._snapshots is not None:
            self._end(failed=True)
        state.rollback_partial_forward()
        if state.is_inference and not torch.is_inference_mode_enabled():
            state.kv.renew()
            state.is_inference = False

    def refuse_unannounced(self) -> None:
        """Refuse K, V or states of a call that no hook announced; a compiled step is checked when it is compiled."""
        if not torch.compiler.is_compiling() and not self.is_running:
            model = self.state.model
            raise ConfigError(
                f"K and V came to a BlendCache made for {type(model).__name__} at {id(model):#x} from a call that it "
                "did not see begin: of another model object, such as a copy, or past the hooks of this one. Call the "
                "model that it was made for, or make one for the other: BlendCache(model, store)."
            )

    def _set_author(self, past: int) -> Author:
        """Make the model as it is now the author of new K and V; ConfigError if another computed the `past` tokens."""
        state = self.state
        author = author_of(state.model, asks_device=False)  # so that it can begin; see `forward_ends`
        if past and author != state.author:
            author = author_of(state.model)
            refuse_other_author(state.author, author, past, ASK_AGAIN)
        state.author = author
        self._snapshots = [layer.snapshot() for layer in state.kv.of_tokens]
        return author

    def _begin_plain(self, request: Request) -> None:
        """Every token is computed: record the tokens, report why nothing is reused."""
        state, reason, pending = self.state, request.fallback_reason, self.state.pending
        if not request.past or (request.width > 1 and not state.is_recording):
            self._set_author(request.past)
        if EXTENDED.get() and is_extended(state.model):
            state.tokens.is_extended = True
        state.tokens.append(request)
        is_reported = bool(reason) and bool(pending.prompts or not request.past)
        if is_reported and not pending.is_begun:
            notice = pending.notice if pending.prompts else ""
            state.report = BlendReport(state.config.recompute_ratio, past_tokens=request.past, notice=notice)
        if is_reported:
            state.report.fallback_reason = reason
            warn_once(NOTHING_REUSED + reason)
        elif not request.past:
            state.report = BlendReport(state.config.recompute_ratio, fallback_reason=ONE_TOKEN)
        if is_reported or pending.is_begun or not request.past:
            state.report.prompt_tokens += request.real_tokens()
        state.pending = pending.behind(request)

    def _begin_blended(self, cache: GuardedCache, request: Request, began_s: float) -> None:
        """Find the chunks of a forward, compute missing ones, and enter the layers if there are any."""
        state, expected = self.state, self.state.pending
        rows, pending = expected.rows(request)
        if state.has_graph:
            state.kv.renew()
            state.has_graph = False

        # Is the model the one that it was?
        refuse_autocast(state.model, state.info.layers)
        if EXTENDED.get():  # some model is inside `self_extend`
            refuse_extended(state.model)
        author = self._set_author(request.past)
        fingerprint = author.fingerprint
        if expected.edit.author != author:  # what was moved is another model's
            rows = [replace(row, moved={}) for row in rows]
        check_ms = state.check_ms + 1e3 * (time.perf_counter() - began_s)

        # Find chunks, fetch them, compute what is missing
        if not expected.prompts and state.config.chunk_prefix_ids is None:
            state.chunk_prefix_ids = state.store.stored_prefix(state.model, fingerprint)
        planner = Planner(
            state.model,
            state.store,
            fingerprint,
            state.chunk_prefix_ids,
            state.config,
            expected.tokenizer,
            state.info.placeholders,
            state.question_ids,
        )
        plan = planner.plan(rows, request.width, request.logits_rows, request.length)
        if planner.fingerprint != fingerprint:  # some were missing, and it has looked at the weights
            fingerprint = self._set_author(request.past).fingerprint

        # Report what was found; a prompt that comes in parts has one report
        if expected.is_begun:
            report = copy.copy(state.report)  # the old one comes back after a failure
        else:
            report = BlendReport(past_tokens=request.past, recipe=state.recipe, _costs=layer_costs(state.model))
            report.nominal_ratio = plan.config.recompute_ratio
            report.quantisation_noise = state.info.quantisation_noise
        for name, figure in plan.found.items():
            setattr(report, name, getattr(report, name) + figure)
        report.check_ms += check_ms
        report.advice = report.advice if plan.advice is None else asdict(plan.advice)
        _report_mismatches(report, state, plan, pending, fingerprint)

        # Enter the layers
        if plan.chunks:
            self._enter_layers(cache, request, plan, report)
        state.tokens.append(request)
        state.report, state.pending, state.check_ms = report, pending, 0.0

    def _enter_layers(self, cache: Any, request: Request, plan: Plan, report: BlendReport) -> None:
        """Begin a prefill by a plan, of a forward that carries `cache`.

        Raises:
            ConfigError: of the cached tokens some layers loaded a part only.
        """
        state = self.state
        if request.past and state.kv.are_partial:
            raise ConfigError(
                f"a prompt came behind {request.past} tokens of which some layers loaded a part only, but it would "
                "attend to all of them. reset() the cache and pass the whole conversation, or open the store without "
                "partial."
            )
        realigner = Realigner(state.info.styles, report, plan.chunks)
        make_loader = state.store.part_loader
        state.loader = None if make_loader is None else make_loader(state)
        if state.loader is not None:
            state.loader.realigner = realigner
        self.prefill = Prefill(
            state.model,
            state.kv.all,
            request,
            plan,
            report,
            realigner,
            state.selector,
            partial(self._probe, cache),
            state.info.extras,
            state.loader,
        )
        inexact = [placed.start for placed in plan.chunks if not placed.exact]
        if inexact:
            first = min(inexact)
            if state.config.chains and not request.past and len(plan.counts) == 1:
                state.link_ends = link_ends(plan.chunks)
                first = state.link_ends[0]  # healing computes again what is between exact entries and the first chunk
            state.mark_inexact(request.past + first)
        self.hooks.enter_layers(request.width)

    def _probe(self, cache: Any, receive: Receive, layers: Sequence[int], rows: int | None = None) -> None:
        """Run the question alone, in the middle of a prefill."""
        from ..prefill.probe import AttentionObserver, ProbePass, run_probe  # few selectors ask for it

        kv = self.state.kv
        prefill: Any = self.prefill
        suspended = []
        snapshots = self._snapshots or []
        for layer, snapshot in zip(kv.of_tokens, snapshots, strict=True):
            suspended.append(layer.suspend(snapshot, self._past))
        probe = ProbePass(prefill, kv.spare(snapshots), AttentionObserver(receive, layers, rows))
        prefill.pause()
        self.prefill = probe
        try:
            with self.hooks.inside():
                run_probe(probe, cache)
        finally:
            self.prefill = prefill
            probe.end()
            prefill.resume()
            for layer, states in zip(kv.of_tokens, suspended, strict=True):
                layer.resume(states)


def _report_mismatches(
    report: BlendReport, state: BlendState, plan: Plan, pending: PendingPrompt, fingerprint: str
) -> None:
    """Warn, and write to the report, where a prompt fits neither the store nor the prompt that was expected.

    Sets `fallback_reason` where nothing of a whole prompt is reused.
    """
    expected, texts = state.pending, list[str]()
    if expected.prompts and pending.is_other:
        texts.append(OTHER_IDS)
    if expected.prompts and expected.notice and not expected.is_begun:
        texts.append(expected.notice)
    tokenizer = expected.tokenizer
    if tokenizer and (others := plan.tokenizers - {tokenizer}):
        texts.append(other_tokenizers(others, tokenizer))
    if plan.kept_ratio < 1:
        texts.append(too_small(plan.kept_ratio))
    if plan.uneven_chunks:
        texts.append(UNEVEN)
    for text in texts:
        warn_once(text)
    report.notice = " ".join(filter(None, (report.notice, *texts)))
    used = report.reusable_tokens + report.exact_tokens
    if expected.edit.fallback_reason and not used and not expected.is_begun:
        report.fallback_reason = expected.edit.fallback_reason
    if pending.is_begun or used or report.past_tokens or report.fallback_reason:
        return
    prefix_ids = state.chunk_prefix_ids
    report.fallback_reason = (
        UNEVEN if plan.uneven_chunks else why_nothing_found(state.store, fingerprint, prefix_ids, tokenizer)
    )
    if report.fallback_reason != EMPTY:  # as every store is at first
        warn_once(NOTHING_REUSED + report.fallback_reason)
