# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What happened in a store, under names for Prometheus.

from prometheus_client import REGISTRY
REGISTRY.register(StoreMetrics(store))
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import import_extra
from .store import Store

__all__ = ["StoreMetrics"]

_COUNTERS = (  # group of `stats`, name, what it counts, labels
    ("hits", "chunk_hits", "Chunks found, by where they were.", ("tier",)),
    ("misses", "chunk_misses", "Chunks that were computed instead, by reason.", ("reason",)),
    ("loaded_bytes", "loaded_bytes", "K and V that were read, in bytes.", ("tier",)),
    ("load_failures", "load_failures", "Entries that could not be used.", ("tier", "reason")),
    ("stored", "chunks_stored", "Chunks written.", ("tier",)),
    ("store_failures", "store_failures", "Chunks that could not be written, by error.", ("reason",)),
    ("evicted", "chunks_evicted", "Chunks that had to leave.", ("tier",)),
    ("removed", "entries_removed", "Entries that were removed, by cause.", ("cause",)),
    ("skipped", "files_skipped", "Files that listing passed over.", ("tier", "reason")),
)
_GAUGES = (
    ("bytes", "tier_bytes", "What a tier holds, in bytes."),
    ("capacity_bytes", "tier_capacity_bytes", "What a tier may hold, in bytes."),
)


class StoreMetrics:
    """A collector of prometheus_client: asks the store when it is asked itself, and costs nothing before."""

    def __init__(self, store: Store, labels: Mapping[str, str] | None = None) -> None:
        self._store = store
        self._labels = dict(labels or {})
        self._core: Any = import_extra("prometheus_client.core", extra="metrics", needed_by="StoreMetrics")

    def describe(self) -> Iterable[Any]:
        """Nothing is collected when the collector is registered."""
        return []

    def collect(self) -> Iterator[Any]:
        """Give every metric with its samples of now."""
        stats = self._store.stats()
        for group, name, text, labels in _COUNTERS:
            rows = {tuple(key.split(":", len(labels) - 1)): value for key, value in stats[group].items()}
            yield self._family("Counter", name, text, labels, rows)
        for stage, seconds in stats["seconds"].items():
            rows = {(tier,): value for tier, value in seconds.items()}
            yield self._family("Counter", stage, f"Time spent, in seconds: {stage}.", ("tier",), rows)
        for group, name, text in _GAUGES:
            rows = {(tier,): value for tier, value in stats[group].items() if value is not None}
            yield self._family("Gauge", name, text, ("tier",), rows)
        yield self._family("Gauge", "entries", "Chunks that are stored.", (), {(): stats["entries"]})

    def _family(
        self, kind: str, name: str, text: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], float]
    ) -> Any:
        family = getattr(self._core, f"{kind}MetricFamily")(f"hf_blend_{name}", text, labels=[*self._labels, *labels])
        for values, value in rows.items():
            family.add_metric([*self._labels.values(), *values], float(value))
        return family
