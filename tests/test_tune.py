# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest ratio that keeps enough is found, and said with what it costs."""

import json

import pytest

from hf_blend import BlendConfig, ChunkStore
from hf_blend.errors import PromptError
from hf_blend.evaluation.tuning import RATIOS, Measure, Point, Prompt, read_prompts, tune


def rising(config):
    return Point(config.recompute_ratio, min(1.0, 0.5 + 5 * config.recompute_ratio), 0, 1, config.recompute_ratio)


@pytest.mark.parametrize(("wanted", "ratio"), [(0.5, 0.0), (0.55, 0.01), (0.7, 0.05), (0.71, 0.05), (1.0, 0.1)])
def test_the_smallest_ratio_that_keeps_enough_is_found(wanted, ratio):
    best, points = tune(rising, BlendConfig(), wanted)
    assert best.recompute_ratio == ratio
    assert [point.recompute_ratio for point in points] == sorted(point.recompute_ratio for point in points)
    assert len(points) <= 5 < len(RATIOS)


def test_nothing_is_found_where_nothing_keeps_enough():
    best, points = tune(lambda config: Point(config.recompute_ratio, 0.5, 0, 1, 0), BlendConfig(), 0.9)
    assert best is None
    assert points[-1].recompute_ratio == 1.0


def test_every_measured_ratio_is_told_once():
    told = []
    _, points = tune(rising, BlendConfig(), 0.9, tell=told.append)
    assert sorted(told, key=lambda point: point.recompute_ratio) == points


def test_without_answers_the_first_token_and_kl_are_compared(shared_model, tokenizer, pieces):
    prompts = [Prompt(pieces(seed=seed)) for seed in range(3)]
    measure = Measure(shared_model(), tokenizer, prompts, ChunkStore.open("memory://"))
    all_of_it = measure(BlendConfig(1.0, "full"))
    assert (all_of_it.kept, all_of_it.low) == (1.0, 1.0)
    assert 0 <= all_of_it.kl < 1e-6 < measure(BlendConfig(0.0, "none")).kl
    assert not measure.by_answer


def test_prompts_are_read_with_and_without_answers(tmp_path):
    lines = [{"chunks": ["a", "b"], "question": "q"}, {"prefix": "p", "chunks": ["c"], "question": "q", "answer": "x"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", "utf-8")
    first, second = read_prompts(path)
    assert (first.pieces["prefix"], first.wanted, second.pieces["chunks"], second.wanted) == (None, None, ["c"], "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ("{", "line 1.*no JSON"),
        ('{"chunks": []}', "line 1.*question is wanted"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_sample_is_refused(tmp_path, text, said):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(PromptError, match=said):
        read_prompts(path)
