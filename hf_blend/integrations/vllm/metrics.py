# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the connector counts, for the log and the registry of vLLM."""

from collections import Counter
from typing import Any

from prometheus_client import Counter as Counted
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

__all__ = ["BlendMetrics", "BlendStats"]

COUNTED = {
    "blended_requests": "Requests whose documents were blended.",
    "failed_requests": "Requests with documents that were left to vLLM because a blend failed.",
    "reused_tokens": "Tokens of prompts whose stored K and V were used.",
    "recomputed_tokens": "Tokens of stored chunks in prompts that were computed again.",
    "computed_chunks": "Chunks that were not stored and were computed.",
}


class BlendStats(KVConnectorStats):
    """Counts of some steps, by the names of `COUNTED`."""

    def reset(self) -> None:
        """Begin at 0."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of other steps."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM writes in its log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing was counted."""
        return not any(self.data.values())


class BlendMetrics(KVConnectorPromMetrics):
    """The counters `vllm:hf_blend_…` of each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        make = metric_types[Counted]
        self._counters = {
            name: create_metric_per_engine(make(f"vllm:hf_blend_{name}", text, labelnames), per_engine)
            for name, text in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what some steps did."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
