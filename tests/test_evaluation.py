# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference models and what is asked of them are what they claim; answers and insides come from real runs."""

import json
import random

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from worlds import reference_questions

from hf_blend import BlendConfig
from hf_blend.evaluation import answering, asking
from hf_blend.evaluation.bench.ttft import TtftPlan, measure_ttft
from hf_blend.evaluation.summary import interval
from tests.asking import jsonl


def test_interval_holds_mean_repeats_itself_and_narrows_with_more_examples():
    draw = random.Random(0)
    few = [draw.random() for _ in range(20)]
    low, high = interval(few)
    assert low < sum(few) / 20 < high
    assert interval(few) == (low, high)
    many = [draw.random() for _ in range(2000)]
    first, last = interval(many)
    assert last - first < (high - low) / 5
    assert interval([1.0] * 9) == (1.0, 1.0)


@pytest.mark.parametrize("hidden", [(), (3, 5)])
def test_divergence_is_that_of_torch_also_where_logits_say_never(hidden):
    got, full = torch.randn(2, 4, 9, dtype=torch.float64).index_fill(2, torch.tensor(hidden).long(), -torch.inf)
    expected = kl_divergence(Categorical(logits=full), Categorical(logits=got))
    assert expected.min() > 0
    assert torch.allclose(answering.divergence(got, full), expected)


def test_reply_is_streamed_as_it_is_returned_and_marks_recomputed_tokens_and_no_others(reference, store):
    question = reference_questions()[0]
    asked = asking.Question("?", {name: question[name] for name in ("prefix", "chunks", "question")})
    blend = answering.Method("blend", BlendConfig(recompute_ratio=0.2))
    heard = list[str]()
    reply = asking.Pipeline(*reference, store).ask(asked, blend, 8, heard.append)
    assert "".join(heard).strip() == reply.answer.text != ""
    marked = sum(chosen for _, chosen in reply.tokens)
    assert marked == len(reply.answer.report.chosen_columns[0]) > 0
    assert marked < len(reply.tokens)
    assert reply.row["recomputed_tokens"] == marked


def test_bench_reports_every_ratio_beside_its_bound():
    plan = TtftPlan("tiny", chunks=3, chunk_tokens=48, question_tokens=8, ratios=(1.0, 0.2), rounds=1)
    told: list[str] = []
    found = measure_ttft(plan, told.append)
    everything, some = found["rows"]
    assert everything["charged_budget"] > some["charged_budget"] > 1 / 8
    assert some["flop_bound"] > everything["flop_bound"] > 0.9
    assert some["reusable_tokens"] == 96
    assert some["exact_tokens"] == 49
    assert len(told) == 6


def test_eval_command_takes_file_of_ones_own(tmp_path, run, model_folder):
    row = {"chunks": ["The mill is old.", "Ann owns it."], "question": "Who owns it?", "answers": ["Ann"]}
    path = jsonl(tmp_path / "mine.jsonl", row, {**row, "question": "What is old?"})
    code, out, _ = run("eval", path, "--model", model_folder, "--method", "full-reuse", "--json")
    (full, reuse) = json.loads(out)["rows"]
    assert code == 0
    assert (full["task"], full["n"], reuse["method"]) == ("questions", 2, "full-reuse")
    assert run("eval", tmp_path / "other.jsonl")[0] == 2
