# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The cheapest candidate that leaves little enough is chosen on one half of the prompts, and measured on the other."""

import json
from dataclasses import asdict

import pytest
import torch

from hf_blend.errors import ConfigError, PromptError
from hf_blend.evaluation.asking import Answer, Loss, Question
from hf_blend.evaluation.tuning import Point, candidates, choose, read_prompts, tune
from tests.asking import jsonl

ROW = {"id": "a", "chunks": ["The mill is old.", "Ann owns it. ", "Bob left."], "question": "Who owns it?"}


def point(name, charged, kl):
    return Point(name, charged, kl, 0.0, 1.0, kl, 0.5, 0.4, 0.6, 3)


@pytest.mark.parametrize(("leave", "name", "is_enough"), [(0.5, "b", True), (0.3, "c", True), (0.05, "c", False)])
def test_cheapest_that_leaves_little_enough_is_chosen_or_else_nearest(leave, name, is_enough):
    points = [point("full reuse", 0.0, 1.0), point("d", 0.4, 0.3), point("b", 0.1, 0.45), point("c", 0.2, 0.1)]
    found, enough = choose(points, leave)
    assert found.candidate == name
    assert enough == is_enough


class FakePipeline:
    """Stands in for `Pipeline`: a candidate at ratio r loses 1 - 2r of full reuse's; what was asked is noted."""

    def __init__(self):
        self.asked = []
        self.stored = []

    def store_chunks(self, prompt, config):
        self.stored.append(prompt.name)

    def full(self, prompt, tokens=10):
        return Answer(f"{tokens} tokens", 10.0, torch.zeros(1), torch.ones(tokens), True, None, torch.zeros(1, 1))

    def loss(self, prompt, full, config):
        self.asked.append((prompt.name, config.recompute_ratio))
        left = max(0.0, 1 - 2 * config.recompute_ratio) * (1 + int(prompt.name))
        return Loss(left, left / 2, config.recompute_ratio, 0.1 + config.recompute_ratio)


def test_choice_is_measured_on_prompts_that_did_not_choose_it():
    measure = FakePipeline()
    prompts = [Question(str(number), {}) for number in range(7)]
    tried = candidates(["random", "boundary@0.45"], (0.1, 0.3))
    got = tune(measure, prompts, tried, 0.5)
    chose = {name for name, ratio in measure.asked if ratio == 0.1}
    reported = [name for name, ratio in measure.asked if ratio in (0.0, 0.3) and name not in chose]
    assert len(chose) == 4
    assert len(reported) == 6
    assert {*reported} | chose == {prompt.name for prompt in prompts} == {*measure.stored}
    assert [one.candidate for one in got.points] == ["full reuse", "random@0.1", "random@0.3", "boundary@0.45"]
    assert [one.kl for one in got.points] == pytest.approx([1, 0.8, 0.4, 0.1])
    assert got.leaves_enough
    choice = got.choice
    assert choice.candidate == "random@0.3"
    assert choice.n == 3
    measured = (choice.kl, choice.low, choice.high, choice.charged, choice.ttft_ratio)
    assert measured == pytest.approx((0.4, 0.4, 0.4, 0.3, 0.4))
    assert got.config["selector"] == "random"
    assert got.config["recompute_ratio"] == 0.3
    assert json.loads(json.dumps(asdict(got)))["config"] == got.config


def test_too_little_to_choose_from_is_refused():
    with pytest.raises(PromptError, match="got 1 prompts, expected 2 or more"):
        tune(FakePipeline(), [Question("0", {})], candidates(["random"], (0.1,)))
    with pytest.raises(ConfigError, match="got 0 candidates"):
        tune(FakePipeline(), [Question("0", {})] * 2, [])


class Chat:
    """A tokenizer of letters with a chat template."""

    chat_template = "x"
    bos_token = None
    bos_token_id = None

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages)

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) % 120 for letter in text]

    def __call__(self, text, **_):
        return {"input_ids": self.encode(text), "offset_mapping": [(at, at + 1) for at in range(len(text))]}


def test_prompts_are_what_chat_model_is_asked_and_keep_their_passages_apart(tmp_path, tokenizer):
    path = jsonl(tmp_path / "rows.jsonl", {**ROW, "answers": ["Ann", "Anna"]}, {**ROW, "id": "b", "answer": "Ann"})
    first, _ = read_prompts(path, Chat())
    assert first.request["documents"] == ["The mill is old.\n\n", "Ann owns it. ", "Bob left.\n\n"]
    assert [one["role"] for one in first.request["messages"]] == ["system", "user"]
    assert first.request["messages"][1]["content"].endswith("Bob left.\n\nQuestion: Who owns it?")
    assert first.name == "row 'a'"
    (plain,) = read_prompts(path, tokenizer, limit=1)
    assert plain.request == {"prefix": None, "chunks": first.request["documents"], "question": "Who owns it?"}


def test_prompt_that_is_too_long_is_refused_by_name(tmp_path, tokenizer):
    with pytest.raises(PromptError, match=r"row 'a' of '.*rows.jsonl' has [67][0-9] tokens.*at most the model's 60"):
        read_prompts(jsonl(tmp_path / "rows.jsonl", ROW), tokenizer, positions=60)


def test_tune_keeps_its_choice_in_store_on_disk_and_says_what_recomputing_bought(tmp_path, run, model_folder):
    rows = [{**ROW, "id": str(number), "question": f"{number}?"} for number in range(2)]
    prompts = ("--prompts", jsonl(tmp_path / "rows.jsonl", *rows))
    words = (*prompts, "--selector", "boundary@0.2", "--leave", 1, "--store", tmp_path / "kv")
    code, _, err = run("tune", "--model", model_folder, *words)
    assert code == 0, err
    assert "2 prompts say little: give 24 or more." in err
    assert "Full reuse costs nothing and has an error of" in err
    assert "Kept in" in err
    [path] = (tmp_path / "kv" / "recipes").glob("*.json")
    kept = json.loads(path.read_text("utf-8"))
    assert kept["settings"]["selector"] in ("boundary", "none")
    assert kept["source"].startswith("tuned on 2 prompts: ")


def test_tune_says_that_choice_misses_its_bar_on_other_half(tmp_path, run, model_folder, monkeypatch):
    rows = [{**ROW, "id": str(number)} for number in range(2)]
    points = iter([point("full reuse", 0.0, 0.2), point("boundary@0.2", 0.2, 0.1), point("full reuse", 0.0, 0.3)])
    monkeypatch.setattr("hf_blend.evaluation.tuning.point_of", lambda *_: next(points))
    words = ("--prompts", jsonl(tmp_path / "rows.jsonl", *rows), "--selector", "boundary@0.2", "--leave", 0.25)
    code, _, err = run("tune", "--model", model_folder, *words)
    assert code == 0
    assert "On the other half the error is above 0.25" in err
