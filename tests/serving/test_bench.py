# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The measurement of a server under load, in small."""

import pytest
from benches.replay import Service, replay
from benches.serve import WAYS, ServePlan, _arrivals, _percentiles, _prompts, measure_serve

from hf_blend.errors import ConfigError

PLAN = ServePlan("tiny", 2, 40, 6, library=5, requests=3, new_tokens=3, rates=(2.0,))


def test_every_way_answers_the_same_requests_at_every_rate():
    said = []
    found = measure_serve(PLAN, said.append)
    at_once, rated = found["rows"][: len(WAYS)], found["rows"][len(WAYS) :]
    assert [row["way"] for row in at_once] == [row["way"] for row in rated] == list(WAYS)
    assert at_once[-1]["blended_requests"] == PLAN.requests
    assert rated[0]["rate"] == pytest.approx(2.0 * at_once[0]["requests_s"])
    assert len(said) == 3 * len(WAYS)
    assert len(found["predicted"]) == len(WAYS) * len(PLAN.machines)
    for row in found["rows"]:
        assert 0 < row["first_token_p50_s"] <= row["first_token_p95_s"] <= row["first_token_p99_s"] <= row["took_s"]
        assert row["tokens_s"] == pytest.approx(row["requests_s"] * PLAN.new_tokens)


def test_arrivals_keep_their_pattern_and_chunks_their_law():
    slow, fast = _arrivals(PLAN, 1.0), _arrivals(PLAN, 4.0)
    assert slow == pytest.approx([4 * at for at in fast])
    plan = ServePlan("tiny", chunks=1, chunk_tokens=4, question_tokens=1, library=30, requests=2000, zipf=1.0)
    library, prompts = _prompts(plan, 500)
    drawn = [library.index(prompt[1:5]) for prompt in prompts]
    assert drawn.count(0) == pytest.approx(2 * drawn.count(1), rel=0.2)
    assert drawn.count(0) == pytest.approx(4 * drawn.count(3), rel=0.3)


def test_a_percentile_is_a_value_that_was_measured():
    assert _percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert _percentiles(list(map(float, range(1, 201)))) == {"p50": 100.0, "p95": 190.0, "p99": 198.0}


def test_a_library_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="1 chunks for 8 in a prompt"):
        measure_serve(ServePlan(library=1))


SERVICE = Service((1.0,) * 3, slice_s=0.25, token_s=0.1, crowded_s=0.4, crowd=4)


def test_a_replay_serves_in_order_and_gives_tokens_between_slices():
    alone = replay(SERVICE, [0.0, 10.0, 20.0], 3)
    assert alone.first_token_s == pytest.approx((1.1,) * 3)
    assert alone.next_token_s == pytest.approx((0.1,) * 6)
    together = replay(SERVICE, [0.0] * 3, 3)
    first = 1.0 + 0.1  # then two slices with a token of the first request behind each, and two without
    assert together.first_token_s == pytest.approx((first, first + 1.0 + 2 * 0.1 + 0.1, first + 2 * 1.3))
    assert max(together.next_token_s) == pytest.approx(0.25 + 0.1)


def test_more_servers_share_requests_and_faster_ones_scale_their_times():
    assert replay(SERVICE, [0.0] * 3, 3, servers=3).first_token_s == pytest.approx((1.1,) * 3)
    faster = replay(SERVICE.faster(10.0, 10.0), [0.0] * 3, 3)
    assert faster.first_token_s[0] == pytest.approx(0.11)
    assert SERVICE.step_s(2) == pytest.approx(0.2)
    assert SERVICE.step_s(0) == 0.0


def test_no_more_requests_decode_than_a_step_has():
    service = Service((0.1,) * 4, slice_s=1.0, token_s=0.1, crowded_s=0.1, crowd=1)
    assert replay(service, [0.0] * 4, 5).first_token_s == pytest.approx((0.2, 0.8, 1.4, 2.0), abs=0.21)
