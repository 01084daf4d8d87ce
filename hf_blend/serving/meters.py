# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics of a server, for Prometheus."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..store.metrics import StoreMetrics
from .service import Running, Service

__all__ = ["Meters"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
UNTIL = "or until it was given up."


class Meters:
    """Counters of requests and tokens, times of first and next tokens, and gauges of the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry, "namespace": "hf_blend"}
        self.requests = Counter("requests", "Requests, by HTTP status.", ["status"], **common)
        self.prefills = Counter("prefills", "Prefills, by how they were done.", ["how"], **common)
        self.tokens = Counter("tokens", "Tokens: of prompts, reused, recomputed, and of answers.", ["kind"], **common)
        self.given_up = Counter("given_up", "Answers without an end, by how far they came.", ["during"], **common)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"{name}_seconds", text, buckets=SECONDS, **common)

        self.waiting = histogram("waiting", f"Time until the prefill of a request began, {UNTIL}")
        self.prefill = histogram("prefill", f"Time from there to the first token, {UNTIL}")
        self.first = histogram("first_token", f"Time to the first token, {UNTIL}")
        self.next = histogram("next_token", "Time between tokens.")
        self.stall = histogram("stall", "How long those that decode waited for a turn of a blended prefill.")
        service.engine.on_stall = self.stall.observe
        self.registry.register(self)
        for tenant, store in service.tenants.stores.items():
            if service.metrics_by_tenant or not tenant:
                self.registry.register(StoreMetrics(store, {"tenant": tenant} if tenant else {}))

    def responded(self, status: int) -> None:
        """Count a response."""
        self.requests.labels(str(status)).inc()

    def answered(self, run: Running, costs: dict[str, Any], is_whole: bool) -> None:
        """Count an answer, also one that was given up."""
        now, first = time.perf_counter(), run.arrived[0] if run.arrived else None
        begun = run.begun or first
        self.waiting.observe((begun or now) - run.started)
        if begun:
            self.prefill.observe((first or now) - begun)
        self.first.observe((first or now) - run.started)
        for before, after in pairwise(run.arrived):
            self.next.observe(after - before)
        if not is_whole:
            self.given_up.labels("waiting" if not begun else "decoding" if first else "prefill").inc()
        own = costs["hf_blend"]
        self.tokens.labels("answer").inc(costs["completion_tokens"])
        if begun:
            self.prefills.labels(own["prefill"]).inc()
            self.tokens.labels("prompt").inc(costs["prompt_tokens"])
            for kind in ("reused", "recomputed", "prefix"):
                self.tokens.labels(kind).inc(own[f"{kind}_tokens"])

    def collect(self) -> Iterator[Any]:
        """Yield the gauges of the engine."""
        service, engine = self._service, self._service.engine
        values = {"requests_running": ("Requests under way.", service.running.total())}
        if engine.batch_processor is not None:
            scheduler = engine.batch_processor.scheduler
            values |= {
                "requests_decoding": ("Requests in the engine's steps.", len(scheduler.active_requests)),
                "requests_waiting": ("Requests that wait for the engine.", len(scheduler.waiting_requests)),
                "requests_held": ("Requests that wait for a blended prefill.", len(engine.prefills)),
                "blocks_used": ("Blocks that requests hold.", engine.paged.blocks_in_use),
                "blocks": ("Blocks there are.", engine.paged.allocator.num_blocks),
            }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"hf_blend_{name}", text, value=value)
        failed = engine.prefills.failures
        yield CounterMetricFamily("hf_blend_prefill_failures", "Blended prefills that failed.", value=failed)
        if engine.healing is not None:
            yield CounterMetricFamily(
                "hf_blend_healed_tokens", "Tokens healed while idle.", value=engine.healing.tokens
            )
            turns = CounterMetricFamily(
                "hf_blend_next_turns",
                "Turns behind a blended one, by whether their chunks were healed.",
                labels=["found"],
            )
            turns.add_metric(["healed"], engine.healing.healed_turns)
            turns.add_metric(["blended"], engine.healing.next_turns - engine.healing.healed_turns)
            yield turns
        steps = getattr(engine, "current_batch", 0)  # it has none before its first step
        yield CounterMetricFamily("hf_blend_steps", "Steps of the engine that did not fail.", value=steps)
