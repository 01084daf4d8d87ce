# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server counts, for Prometheus."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..store.metrics import StoreMetrics
from .service import Running, Service

__all__ = ["Meters"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Meters:
    """Counters of requests and tokens, times of first and next tokens, and gauges that ask the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry, "namespace": "hf_blend"}
        self.requests = Counter("requests", "Requests, by HTTP status.", ["status"], **given)
        self.prefills = Counter("prefills", "Prefills, by how they were done.", ["how"], **given)
        self.tokens = Counter("tokens", "Tokens: of prompts, reused, recomputed, and of answers.", ["kind"], **given)
        self.first = Histogram("first_token_seconds", "Time to the first token.", buckets=SECONDS, **given)
        self.next = Histogram("next_token_seconds", "Time between tokens.", buckets=SECONDS, **given)
        self.registry.register(self)
        for tenant, store in service.tenants.stores.items():
            if service.metrics_by_tenant or not tenant:
                self.registry.register(StoreMetrics(store, {"tenant": tenant} if tenant else {}))

    def responded(self, status: int) -> None:
        """Count a response."""
        self.requests.labels(str(status)).inc()

    def answered(self, run: Running | None, costs: dict[str, Any], is_whole: bool) -> None:
        """Count an answer, or what there was of it."""
        if run is None or not is_whole:
            return
        own = costs["hf_blend"]
        self.prefills.labels(own["prefill"]).inc()
        self.tokens.labels("prompt").inc(costs["prompt_tokens"])
        self.tokens.labels("answer").inc(costs["completion_tokens"])
        for kind in ("reused", "recomputed", "prefix"):
            self.tokens.labels(kind).inc(own[f"{kind}_tokens"])
        times = [run.started, *run.arrived]
        for number, (before, after) in enumerate(pairwise(times)):
            (self.next if number else self.first).observe(after - before)

    def describe(self) -> list[Any]:
        """Nothing is collected when this is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """What the engine knows, as it is now."""
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
        steps = getattr(engine, "current_batch", 0)  # it has none before its first step
        yield CounterMetricFamily("hf_blend_steps", "Steps of the engine that did not fail.", value=steps)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return bytes(generate_latest(self.registry))
