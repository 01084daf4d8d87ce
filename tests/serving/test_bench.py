# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The measurement of a server under load, in small."""

import threading
from dataclasses import replace

import pytest
from benches.serve import (
    BLEND,
    CACHE,
    LLAMA,
    WAYS,
    Clock,
    ServePlan,
    _interval,
    _percentile,
    _prompts,
    measure_serve,
    summary,
)

from hf_blend.errors import ConfigError

PLAN = ServePlan(
    shape="tiny", documents=4, chunks=2, least_tokens=18, most_tokens=24, new_tokens=3, at_once=2, rounds=1,
    requests=2, loads=(0.5,),
)  # fmt: skip


@pytest.mark.slow
def test_every_way_answers_the_same_requests_and_a_second_run_goes_on(tmp_path):
    plan, said = replace(PLAN, out=str(tmp_path / "serve.json")), []
    before = {one for one in threading.enumerate() if not one.daemon}
    measure_serve(replace(plan, loads=()), said.append)
    assert len(said) == len(WAYS)
    found = measure_serve(plan, said.append)
    assert len(said) == 2 * len(WAYS), "the round is not run again"
    found = measure_serve(replace(plan, rounds=2, ways=(CACHE, BLEND)), said.append)
    assert len(said) == 2 * len(WAYS) + 4
    assert [(row["run"], row["way"]) for row in found["rows"]] == [
        (run, way) for run in ("at once", "load 0.5") for way in WAYS
    ]
    assert len(set(map(tuple, found["arrivals"].values()))) == 2, "each round has arrivals of its own"
    for row in found["rows"]:
        n = 4 if row["way"] in (CACHE, BLEND) else 2
        assert row["n"] == row["same_answers"][0] == row["same_answers"][1] == n
        assert 0 < row["first_token_p50_s"][0] <= row["first_token_p95_s"][0] <= row["first_token_p99_s"][0]
        assert row["requests_per_cpu_s"][0] == pytest.approx(row["n"] / row["cpu_s"])
    prefills = [how for run in found["runs"] if run["way"] == BLEND for how in run["prefills"]]
    assert len(prefills) == 8
    assert {*prefills} <= {"blended", "shared"}, "the second may come while the first is there"
    with pytest.raises(ConfigError, match="measured with another new_tokens"):
        measure_serve(replace(plan, new_tokens=4))
    assert {one for one in threading.enumerate() if not one.daemon} == before, "a thread keeps the process alive"


REFUSED = {
    "llama.cpp is asked for 'tiny'": {"ways": (LLAMA,)},
    "the ways are": {"ways": ("vllm",)},
    "4 documents for 8 in a prompt": {"chunks": 8},
}


@pytest.mark.parametrize("said", REFUSED)
def test_serve_refuses_what_it_cannot_measure(said):
    with pytest.raises(ConfigError, match=said):
        measure_serve(replace(PLAN, **REFUSED[said]))


def test_documents_keep_their_law_and_prompts_do_not_depend_on_how_many_there_are(shared_model):
    plan = ServePlan(documents=30, chunks=1, least_tokens=4, most_tokens=4, requests=2000, rounds=0, zipf=1.0)
    prompts = _prompts(plan, shared_model("llama"))
    assert _prompts(replace(plan, requests=40), shared_model("llama")).items() <= prompts.items()
    tokens = [prompt.known[0].token_ids for prompt in prompts.values()]
    drawn = sorted(map(tokens.count, set(tokens)), reverse=True)
    assert drawn[0] == pytest.approx(2 * drawn[1], rel=0.2)
    assert drawn[0] == pytest.approx(4 * drawn[3], rel=0.3)


def test_a_clock_stands_while_nobody_waits():
    clock = Clock()
    clock.skip_to(100.0)
    clock.skip_to(50.0)
    assert 100.0 <= clock() < 110.0


def test_a_percentile_is_a_value_that_was_measured_and_an_interval_holds_it():
    assert [_percentile([3.0, 1.0, 2.0], share) for share in (50, 95, 99)] == [2.0, 3.0, 3.0]
    assert [_percentile(range(1, 201), share) for share in (50, 95, 99)] == [100, 190, 198]
    middle, least, most = _interval([[one] for one in range(101)], lambda drawn: _percentile(drawn, 50))
    assert 30 < least < middle == 50 < most < 70
    assert _interval([[1.0, 2.0]], max) == [2.0], "one round says nothing of others"


def test_rounds_are_drawn_again_as_a_whole():
    runs = [
        {"run": f"round {number}", "way": BLEND, "cpu_s": cpu_s, "wall_s": 9.0, "first_token_s": [1.0, 2.0],
         "answers": [[1], [2]]}
        for number, cpu_s in enumerate((1.0, 2.0, 4.0))
    ]  # fmt: skip
    row = summary(runs)[0]
    assert (row["n"], row["cpu_s"], row["wall_s"], row["same_answers"]) == (6, 7.0, 27.0, [0, 0])
    assert row["requests_per_cpu_s"] == pytest.approx([6 / 7, 0.5, 2.0])
