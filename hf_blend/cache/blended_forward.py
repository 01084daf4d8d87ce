# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One forward in which stored K and V take the place of most tokens, and what undoes it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..prefill.blend import Prefill
from ..prefill.context import PrefillContext
from ..prefill.observing import AttentionObserver, run_probe
from ..prefill.plan import Plan
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..prefill.request import PendingPrompt, Request
from ..selectors.base import Hear


class BlendedForward:
    """A cache in one blended forward: made when it begins, gone when it ends.

    Attributes:
        prefill: what runs; for the time of a probe the probe's.
    """

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
        context = PrefillContext(
            cache.model,
            cache.kv.all,
            request,
            plan,
            cache.report,
            realigner,
            cache.planning.selector,
            cache.planning.corrector,
            self._probe,
            cache.traits.extras,
            cache.observer,
            cache.loader,
        )
        self._snapshots = self._kv.snapshots()
        self.prefill: Any = Prefill(context)

    def end(self, failed: bool) -> None:
        """Settle the layers; after a failure the cache is as it was before."""
        cache = self._cache
        self.prefill.end()
        self.prefill = None  # it holds this object by its probe
        if cache.loader is not None:
            cache.report.partial = vars(cache.loader.report)
        if failed:
            self._kv.restore(self._snapshots)
            cache.prompts.pending, cache.report = self._pending, self._report

    def _probe(
        self, hear: Hear, layers: Sequence[int], anchors: Tensor | None = None, rows: int | None = None
    ) -> None:
        """Run the question alone, in the middle of the forward."""
        cache, prefill, kv_layers = self._cache, self.prefill, self._kv.of_tokens
        request = prefill.context.request
        pairs = zip(kv_layers, self._snapshots, strict=True)
        suspended = [layer.suspend(snapshot, request.past) for layer, snapshot in pairs]
        self.prefill = probe = prefill.probe(
            AttentionObserver(hear, layers, anchors, rows), lambda: self._kv.spare(self._snapshots)
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
