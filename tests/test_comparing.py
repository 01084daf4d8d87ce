# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Two runs beside each other: what is paired, what the difference is, and what is refused."""

import json

import numpy as np
import pytest

from hf_blend.errors import ConfigError
from hf_blend.evaluation.summary import compared


def written(folder, scores, model="one", method="boundary", ttft_ms=100.0, tail=""):
    """A folder with answers to samples 0, 1, 2, …; None leaves a sample out."""
    folder.mkdir()
    about = {"task": "needle", "model": model, "method": method, "ratio": 0.1, "ttft_ms": ttft_ms}
    lines = [{**about, "id": f"{n}", "score": score} for n, score in enumerate(scores) if score is not None]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, "utf-8")
    return folder


def test_the_difference_is_paired_over_the_samples_that_both_answered(tmp_path):
    first = written(tmp_path / "a", [0, 1, 0, 1, None, 1] * 10, ttft_ms=100.0)
    second = written(tmp_path / "b", [1, 1, 0, 0, 1, None] * 10, ttft_ms=50.0, tail='{"task": "nee')
    (row,) = compared(first, second)
    assert (row["n"], row["first_better"], row["second_better"]) == (40, 10, 10)
    assert row["difference"] == row["second_score"] - row["first_score"] == 0
    draws = np.random.default_rng(5).choice([1, 0, 0, -1], size=(4000, 40)).mean(axis=1)
    assert [row["low"], row["high"]] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.04)
    assert row["speedup"] == 2
    assert compared(second, first)[0]["high"] == pytest.approx(-row["low"], abs=0.05)


def test_runs_of_one_model_each_are_paired_across_models_and_others_are_not(tmp_path):
    first, second = written(tmp_path / "a", [1, 0], model="one"), written(tmp_path / "b", [1, 1], model="two")
    assert [row["model"] for row in compared(first, second)] == [None]
    both = (first / "answers.jsonl").read_text() + (second / "answers.jsonl").read_text()
    (second / "answers.jsonl").write_text(both)
    (row,) = compared(first, second)
    assert (row["model"], row["difference"]) == ("one", 0)


def test_what_cannot_be_compared_is_refused(tmp_path, run):
    first, second = written(tmp_path / "a", [1]), written(tmp_path / "b", [1], method="none")
    with pytest.raises(ConfigError, match="no answer in common"):
        compared(first, second)
    with pytest.raises(ConfigError, match=r"has no answers\.jsonl"):
        compared(first, tmp_path)
    for words, says in (((), "two runs, but there are 1"), ((first, "--chunk-tokens", 64), "is --chunk-tokens, too")):
        code, _, err = run("eval", "compare", first, *words)
        assert code == 2
        assert says in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"score": 1}', '{"score": null}', '{"score": NaN}', '{"ratio": [1]}', "\udcff"]
)
def test_a_line_that_is_no_answer_is_refused_by_name(tmp_path, line):
    about = {"task": "needle", "model": "one", "method": "boundary", "ratio": 0.1, "id": "7", "score": 1}
    if line.startswith("{") and line != '{"score": 1}':
        line = json.dumps({**about, **json.loads(line)})
    first, second = written(tmp_path / "a", [1]), written(tmp_path / "b", [1])
    with (second / "answers.jsonl").open("ab") as file:
        file.write(f"{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="has a damaged line"):
        compared(first, second)


def test_a_run_that_measured_without_scoring_is_refused_by_name(tmp_path):
    first, second = written(tmp_path / "a", [1]), written(tmp_path / "b", [1])
    line = {"task": "needle", "model": "one", "method": "deviations", "ratio": None, "id": "0", "layers": [0.1]}
    (second / "answers.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="has a damaged line: no score"):
        compared(first, second)


def test_letters_that_end_lines_elsewhere_end_no_answer(tmp_path):
    first, second = written(tmp_path / "a", []), written(tmp_path / "b", [])
    about = {"task": "needle", "model": "one", "method": "boundary", "ratio": 0.1, "score": 1}
    lines = [{**about, "id": f"{n}", "answer": "one\u2028two\x85three"} for n in range(3)]
    for folder in (first, second):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / "answers.jsonl").write_text(text, "utf-8")
    assert [row["n"] for row in compared(first, second)] == [3]


def test_the_command_line_compares_two_folders(tmp_path, run):
    first, second = written(tmp_path / "a", [0, 0]), written(tmp_path / "b", [1, 0])
    code, out, _ = run("eval", "compare", first, second, "--json")
    assert (code, json.loads(out)[0]["difference"]) == (0, 0.5)
