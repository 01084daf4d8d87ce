# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Counters under names for Prometheus, and chunks weighed by what requests found important in them."""

import sys

import pytest

from hf_blend import ChunkStore
from hf_blend.errors import MissingExtraError
from hf_blend.store.metrics import StoreMetrics
from hf_blend.store.tiers.memory import MemoryTier
from tests.faults.faulty_tier import FaultyTier


def collected(store, labels=None):
    """A registry that asks a store."""
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    registry.register(StoreMetrics(store, labels))
    return registry


def test_stats_are_collected_under_stable_names(tmp_path, chunk):
    prometheus = pytest.importorskip("prometheus_client")
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        registry = collected(store, {"store": "mine"})
        store.put(chunk())
        store.get(chunk().key)
        store.get(chunk((9, 9)).key)

        def value(name, **labels):
            return registry.get_sample_value(f"hf_blend_{name}", {"store": "mine", **labels})

        assert value("chunk_hits_total", tier="disk") == 1
        assert value("chunk_misses_total", reason="absent") == 1
        assert value("chunks_stored_total", tier="disk") == 1
        assert value("entries") == 1
        assert value("tier_bytes", tier="disk") == store.stats()["bytes"]["disk"] > 0
        assert value("load_seconds_total", tier="disk") > 0
        assert prometheus.generate_latest(registry).decode().count("# TYPE hf_blend_") >= 11


def test_failures_have_their_tier_and_reason(chunk):
    store = ChunkStore([], [tier := FaultyTier(MemoryTier())])
    store.put(chunk())
    tier.arm("read.flip")
    store.get(chunk().key)
    families = collected(store).collect()
    failed = [one for family in families for one in family.samples if one.name == "hf_blend_load_failures_total"]
    assert [(one.labels["tier"], one.value) for one in failed] == [("bytes", 1)]
    assert failed[0].labels["reason"] in ("format", "digest", "key", "truncated", "codec", "fingerprint")


def test_missing_package_names_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(MissingExtraError, match=r"hf-blend\[metrics\]"):
        StoreMetrics(ChunkStore.open("memory://"))
