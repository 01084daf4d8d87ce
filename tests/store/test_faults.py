# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Some faults of every class, and the tier that fails on purpose: never a wrong chunk."""

import pytest

from hf_blend import plugins
from hf_blend.errors import ConfigError
from hf_blend.store import ChunkStore
from hf_blend.store.tiers.memory import MemoryTier
from hf_blend.testing import FAULTS, FaultyTier

CLASSES = plugins.describe("evaluation.faults")


@pytest.mark.parametrize("name", CLASSES)
def test_no_promise_is_broken_by(name, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    kind = plugins.load("evaluation.faults", name)
    outcome = kind(folder, 0).run(3 if kind.kill_share else 30)
    assert (outcome.wrong_kv, outcome.torn, outcome.lost, outcome.hangs) == (0, 0, 0, 0)
    assert outcome.faults >= (3 if kind.kill_share else 30)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_purpose_happens_once_and_is_counted(fault, chunk, same):
    tier = FaultyTier(MemoryTier())
    store, stored = ChunkStore([], [tier]), chunk()
    if fault.startswith("put"):
        tier.arm(fault)
        store.put(stored)
        if fault in ("put.io", "put.full", "put.lost"):
            assert not store.contains(stored.key)
    else:
        store.put(stored)
        tier.arm(fault)
    assert store.get(stored.key) is None or fault in ("read.late", "stat.io", "names.io", "delete.io", "open.other")
    store.contains(stored.key)
    len(store)
    store.put(stored)
    same(store.get(stored.key), stored)
    if not fault.startswith("delete"):
        assert tier.counts == {fault: 1}


def test_the_same_seed_fails_in_the_same_way(chunk):
    def run(seed):
        tier = FaultyTier(MemoryTier(), seed, {"open.io": 0.3, "put.full": 0.3})
        store = ChunkStore([], [tier])
        return [(store.put(chunk((1, n % 5))), store.get(chunk((1, n % 5)).key) is None)[1] for n in range(40)]

    assert run(1) == run(1) != run(2)


def test_a_fault_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"open\.oi.*open\.io"):
        FaultyTier(MemoryTier(), rates={"open.oi": 0.1})
    with pytest.raises(ConfigError, match="at most 1"):
        FaultyTier(MemoryTier(), rates={"open.io": 0.7, "open.absent": 0.7})
