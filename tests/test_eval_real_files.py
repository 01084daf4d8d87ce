# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whole runs on the published files: every task, every method, a small random model, the tokenizer of Mistral."""

from pathlib import Path

import pytest

from hf_blend.evaluation.blending import method_names
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.methods.base import EvalMethod
from hf_blend.evaluation.summary import summarised
from hf_blend.evaluation.tasks.base import Task
from hf_blend.evaluation.trial import EvalConfig, run

FILES = {
    "musique": "musique_cacheblend.jsonl",
    "wikimqa": "2wikimqa_cacheblend_clean.jsonl",
    "hotpotqa": "hotpotqa_natural.jsonl",
    "samsum": "restricted/samsum_longbench_mini_fewshot.jsonl",
    "multi-news": "hotpotqa_natural.jsonl",  # the news may not be given away: any passages, asked for a summary
    "needle": None,
}
LIMIT = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model, mistral_tokenizer):
    path = tmp_path_factory.mktemp("random-model")
    tiny_model(vocab_size=32000, max_position_embeddings=32768).save_pretrained(path)
    mistral_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    """Random models do not end; four tokens of an answer are as good as 512."""
    init = EvalMethod.__init__

    def shorter(self, model, tokenizer, store, max_new_tokens):
        init(self, model, tokenizer, store, min(4, max_new_tokens))

    monkeypatch.setattr(EvalMethod, "__init__", shorter)


@pytest.mark.slow
@pytest.mark.parametrize("task", FILES)
def test_every_method_answers_every_task_and_the_counts_of_the_run_are_right(
    published, folder, tmp_path, monkeypatch, task
):
    name = FILES[task]
    if name and not (published / name).is_file():
        pytest.skip(f"{name} is not here")
    data = ((task, str(published / name)),) if name else ()
    trial = EvalConfig((task,), (folder,), tuple(method_names()), (0.15,), LIMIT, data=data)
    seen = []
    samples_of = Task.samples
    monkeypatch.setattr(Task, "samples", lambda *given: seen.append(samples_of(*given)) or seen[-1])
    with RunFolder(tmp_path / "run", trial.settings) as place:
        run(trial, place)
        lines = list(place.lines.values())
    (samples,) = seen
    assert len(samples) == LIMIT
    assert len(lines) == LIMIT * len(method_names())
    check_counts(samples, lines)
    rows = summarised(trial.settings, lines)["rows"]
    assert [row["method"] for row in rows] == list(method_names())
    assert all(row["n"] == LIMIT and 0 <= row["low"] <= row["score"] <= row["high"] <= 1 for row in rows)
    before = Path(tmp_path / "run" / "answers.jsonl").read_bytes()
    with RunFolder(tmp_path / "run", trial.settings) as place:
        monkeypatch.setattr("hf_blend.evaluation.trial.load_model", None)
        run(trial, place)
    assert Path(tmp_path / "run" / "answers.jsonl").read_bytes() == before, "run again, it does nothing"


def check_counts(samples, lines):
    """Tokens, and which chunks of a run were there before, against the samples themselves."""
    known = set()
    for sample in samples:
        own = [line for line in lines if line["id"] == sample.id]
        behind = 1 + len(sample.prefix) + sum(map(len, sample.chunks))
        assert {line["prompt_tokens"] for line in own} == {behind + len(sample.question)}
        pieces = {(1, *sample.prefix), *sample.chunks}
        assert {line["computed_chunks"] for line in own} == {len(pieces - known)}
        known |= pieces
        by_method = {line["method"]: line for line in own}
        assert by_method["full-prefill"]["reused_tokens"] == 0
        assert by_method["full-reuse"]["reused_tokens"] == by_method["auto"]["reused_tokens"] == behind
        assert by_method["prefix-caching"]["exact_output"]
        assert by_method["prefix-caching"]["reused_tokens"] in (0, 1 + len(sample.prefix), behind - sum(
            map(len, sample.chunks[1:])
        ))  # fmt: skip
        full = by_method["full-prefill"]
        assert (full["kl"], full["top1"], full["exact_output"], full["charged_budget"]) == (0.0, 1.0, True, 1.0)
        assert all(0 <= score <= 1 for line in own for score in line["scores"].values())
