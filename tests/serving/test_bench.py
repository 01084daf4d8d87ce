# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The measurement of a server under load, in small."""

import pytest

from hf_blend.errors import ConfigError
from hf_blend.evaluation.bench.serve import WAYS, ServePlan, _arrivals, _percentiles, _prompts, measure_serve

PLAN = ServePlan("tiny", 2, 40, 6, library=5, requests=3, new_tokens=3, rates=(2.0,))


def test_every_way_answers_the_same_requests_at_every_rate():
    said = []
    found = measure_serve(PLAN, said.append)
    assert list(found["capacity"]) == list(WAYS) == [row["way"] for row in found["rows"]]
    assert found["capacity"]["blend"]["blended_requests"] == PLAN.requests
    assert found["rows"][0]["rate"] == pytest.approx(2.0 * found["capacity"]["full"]["requests_s"])
    assert len(said) == 2 * len(WAYS)
    for row in [*found["capacity"].values(), *found["rows"]]:
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
