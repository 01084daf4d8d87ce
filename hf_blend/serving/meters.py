# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The metrics of a server, for Prometheus."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .worker import Ending, ModelWorker

__all__ = ["Meters"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Meters:
    """Counts of responses and tokens, the time to the first token, and what waits."""

    def __init__(self, worker: ModelWorker) -> None:
        self._worker = worker
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry, "namespace": "hf_blend"}
        self._responses = Counter("requests", "Responses, by HTTP status.", ["status"], **common)
        self._tokens = Counter("tokens", "Tokens: of prompts, reused, recomputed, of answers.", ["kind"], **common)
        self._first = Histogram("first_token_seconds", "Time to the first token.", buckets=SECONDS, **common)
        self.registry.register(self)

    def responded(self, status: int) -> None:
        """Count a response."""
        self._responses.labels(str(status)).inc()

    def answered(self, answer: Ending, first_token_s: float) -> None:
        """Count a whole answer."""
        usage = answer.usage
        self._first.observe(first_token_s)
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("answer").inc(usage["completion_tokens"])
        self._tokens.labels("reused").inc(usage["hf_blend"]["reused_tokens"])
        self._tokens.labels("recomputed").inc(usage["hf_blend"]["recomputed_tokens"])

    def collect(self) -> Iterator[Any]:
        """Yield what the worker knows."""
        yield GaugeMetricFamily("hf_blend_requests_waiting", "Requests that wait.", value=self._worker.waiting)
        yield CounterMetricFamily("hf_blend_healed_tokens", "Tokens healed.", value=self._worker.healed_tokens)
