# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that are served under policies of eviction read from the slow tier what the policy does not hold."""

import pytest
from eviction import EvictionPlan, Recorded, Request, _sample
from eviction_ttft import HeldTier, Served, saved, serve
from tiny_models import tiny_model as zoo_model

from hf_blend import ChunkStore

CHUNKS = [tuple(range(first, first + 48)) for first in (5, 20, 40, 60)]
QUESTION = (7, 8, 9, 11)


@pytest.fixture(scope="module")
def times(tokenizer):
    held = {"none": frozenset(), "some": frozenset([0, 2]), "all": frozenset(range(4))}
    sample = [Served((0, 1, 2), QUESTION, held), Served((3, 1), QUESTION, held)]
    known = [((0, 1, 2), QUESTION), ((3, 1), QUESTION)]
    return serve(zoo_model("llama"), tokenizer, CHUNKS, known, {0.5: sample}, 1.0)[0.5]


def test_what_is_not_held_and_nothing_else_comes_from_the_slow_tier(times):
    tier = HeldTier(1e9)
    with ChunkStore([], [tier]) as store:
        store.add(zoo_model("llama"), None, CHUNKS)
        created = sorted((stat.created, stat.nbytes) for _, stat in tier.listing())
        sizes = [nbytes for _, nbytes in created]
    read = {policy: [nbytes for _, nbytes in some] for policy, some in times["whole"].items()}
    first, second = read["all"]  # the prompt's beginning, which no policy holds
    twice = 0.01  # the beginning of an entry is read twice; a chunk is a third
    assert read["none"] == pytest.approx([first + sum(sizes[:3]), second + sizes[3] + sizes[1]], rel=twice)
    assert read["some"] == pytest.approx([first + sizes[1], second + sizes[3] + sizes[1]], rel=twice)


def test_in_part_less_is_read_the_more_is_held(times):
    read = {policy: [nbytes for _, nbytes in some] for policy, some in times["part"].items()}
    whole = {policy: [nbytes for _, nbytes in some] for policy, some in times["whole"].items()}
    assert read["all"][0] < read["some"][0] < read["none"][0] < whole["none"][0]
    assert read["some"][1] == read["none"][1], "it holds none of the second request's chunks"


def test_what_is_saved_is_paired_by_request():
    times = {"whole": {"lru": [(10.0, 5), (20.0, 7)], "importance": [(7.0, 1), (19.0, 3)]}}
    row = saved(times, "lru", "importance")
    assert (row["whole_ttft_ms"], row["whole_slow_bytes"], row["whole_saved_ms"]) == (15.0, 6, 2.0)
    assert row["whole_saved_ms_interval"] == (1.0, 3.0)
    assert saved(times, "importance", "importance") == {"whole_ttft_ms": 13.0, "whole_slow_bytes": 2}
    assert saved({}, "lru", "importance") == {}


def test_a_sample_knows_what_each_policy_holds_before_the_request_comes():
    requests = {story: [Request((2 * story, 2 * story + 1), (0.5, 0.1), "who")] for story in range(4)}
    plan = EvictionPlan(requests=40, seeds=3, served=7)
    sample = _sample(plan, 0.5, Recorded(requests, CHUNKS * 2, [100] * 8))
    assert len(sample) == 7
    for one in sample:
        assert set(one.held) == {"lru", "lfu", "importance"}
        assert all(len(held) <= 4 for held in one.held.values()), "half of the bytes"
    assert any(one.held["lru"] != one.held["importance"] for one in sample)
