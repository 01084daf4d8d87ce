# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference model is asked in earnest: answers, scores and timings come from real runs of it."""

import random

import pytest
from worlds import reference_questions

from hf_blend import BlendConfig, ChunkStore, ConfigError
from hf_blend.evaluation import answering, asking
from hf_blend.evaluation.bench.shapes import random_model
from hf_blend.evaluation.bench.ttft import TtftPlan, measure_ttft
from hf_blend.evaluation.summary import interval

EVERYTHING = answering.Method("all", BlendConfig(recompute_ratio=1.0))


@pytest.mark.parametrize(
    ("text", "wanted", "right"), [("Selby.", "selby", True), (" a  b ", "a b", True), ("ab", "a", False)]
)
def test_an_answer_is_right_but_for_case_space_and_a_full_stop(text, wanted, right):
    assert answering.is_right(text, wanted) is right


def test_an_interval_holds_the_mean_repeats_itself_and_narrows_with_more_examples():
    draw = random.Random(0)
    few, many = ([draw.random() for _ in range(count)] for count in (20, 2000))
    low, high = interval(few)
    assert low < sum(few) / 20 < high
    assert interval(few) == (low, high)
    assert interval(many)[1] - interval(many)[0] < (high - low) / 5
    assert interval([1.0] * 9) == (1.0, 1.0)


def test_the_answer_is_streamed_as_it_is_returned(reference):
    question = reference_questions()[0]
    pieces = {name: question[name] for name in ("prefix", "chunks", "question")}
    heard: list[str] = []
    got = answering.answer(*reference, ChunkStore.open("memory://"), EVERYTHING, pieces, heard.append)
    assert "".join(heard).strip() == got.text != ""


def test_a_reply_marks_the_recomputed_tokens_and_no_others(reference):
    question = reference_questions()[0]
    asked = asking.Asked({name: question[name] for name in ("prefix", "chunks", "question")}, "?", question["answer"])
    blend = answering.Method("blend", BlendConfig(recompute_ratio=0.2))
    reply = asking.ask(*reference, ChunkStore.open("memory://"), asked, blend, 8)
    marked = sum(chosen for _, chosen in reply.tokens)
    assert marked == len(reply.answer.report.chosen_columns[0]) > 0
    assert marked < len(reply.tokens)
    keys = {"method", "question", "answer", "is_cut", "ttft_ms", "charged_budget", "sources"}
    assert set(reply.row) == keys


def test_the_bench_reports_every_ratio_beside_its_bound():
    plan = TtftPlan("tiny", chunks=3, chunk_tokens=48, question_tokens=8, ratios=(1.0, 0.2), rounds=1)
    told: list[str] = []
    found = measure_ttft(plan, told.append)
    everything, some = found["rows"]
    assert everything["charged_budget"] > some["charged_budget"] > 1 / 8
    assert some["flop_bound"] > everything["flop_bound"] > 0.9
    assert some["reusable_tokens"] == 96
    assert some["exact_tokens"] == 49
    assert len(told) == 6


def test_an_unknown_shape_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"smollm2_135.*Did you mean 'smollm2-135m'"):
        random_model("smollm2_135", None, "cpu")
