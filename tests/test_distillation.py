# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Training of a correction: that it measures what a blended prompt answers, and makes it smaller."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.evaluation.fitting import DOCUMENTS, made_documents, prompts_of, read_documents
from hf_blend.model.anatomy import default_sink
from hf_blend.model.correction import ContextCorrection
from hf_blend.prompt.pieces import Span
from hf_blend.training import distillation
from hf_blend.training.distillation import distilled
from tests.conftest import random_ids

FAMILIES = ("llama", "gpt_neox", "phi", "cohere", "gemma3_text", "smollm3")  # whole, partial, pairs, windows, none
CHUNKS, TOKENS, HEAD = 3, 12, 5
HELD_OUT, ANSWER_TOKENS = 1, 4


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    for name, value in (("HELD_OUT", HELD_OUT), ("TRIED", 1), ("ANSWER_TOKENS", ANSWER_TOKENS)):
        monkeypatch.setattr(distillation, name, value)


def asked(count, questions=2):
    """Prompts of random chunks with random questions."""
    for number in range(count):
        parts = [random_ids(TOKENS, 100 * number + part) for part in range(CHUNKS)]
        spans = [Span.whole(HEAD + TOKENS * part, ids) for part, ids in enumerate(parts)]
        for question in range(questions):
            own = random_ids(9 + question, 50 * number + question)
            yield [*random_ids(HEAD, 7 + number), *(token for ids in parts for token in ids), *own], spans


def correction_of(model, **settings):
    return ContextCorrection.fit(model, list(asked(HELD_OUT + 1))[::2], rank=4, **settings)


def divergence_of_stock(model, correction, prompts, path):
    """Mean divergence of answers behind full reuse, by `BlendCache` and stock prefill: nats a token."""
    correction.save(path)
    found = []
    for ids, spans in prompts:
        whole, answer = DynamicCache(config=model.config), list[int]()
        logits = model(torch.tensor([ids]), past_key_values=whole).logits[0, -1:]
        expected = [logits]
        while len(answer) < ANSWER_TOKENS - 1:
            answer.append(int(expected[-1].argmax()))
            expected.append(model(torch.tensor([answer[-1:]]), past_key_values=whole).logits[0])
        with ChunkStore.open("memory://", correction=path) as store:
            cache = BlendCache(model, store, recompute_ratio=0.0, selector="none", allow_unverified=True)
            last = spans[-1].stop
            chunks = [list(span.token_ids) for span in spans]
            inputs = cache.inputs(None, prefix=ids[: spans[0].start], chunks=chunks, question=ids[last:])
            assert inputs["input_ids"][0].tolist() == ids
            first = model(**inputs, past_key_values=cache, logits_to_keep=1).logits[0]
            assert cache.report.reusable_tokens == CHUNKS * TOKENS
            rest = model(torch.tensor([answer]), past_key_values=cache).logits[0]
        pair = [one.float().log_softmax(-1) for one in (torch.cat(expected), torch.cat((first, rest)))]
        found.append(float((pair[0].exp() * (pair[0] - pair[1])).sum(-1).mean()))
    return sum(found) / len(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_divergence_that_is_trained_is_that_of_a_blended_prompt(shared_model, family, tmp_path):
    model = shared_model(family)
    model.generation_config.eos_token_id = None
    start = correction_of(model)
    prompts = list(asked(HELD_OUT + 1))
    found = distilled(model, start, prompts)
    held = [prompt for prompt in prompts if prompt[0][:HEAD] != prompts[0][0][:HEAD]]
    with torch.no_grad():
        fitted = divergence_of_stock(model, start, held, tmp_path / "start")
        trained = divergence_of_stock(model, found.correction, held, tmp_path / "found")
    assert (found.fitted, found.trained) == pytest.approx((fitted, trained), rel=2e-3, abs=1e-6)
    assert found.alone > 1e-5


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_gradient_is_the_slope_of_the_loss(shared_model, family):
    model = shared_model(family)
    start = correction_of(model)
    documents = distillation._Documents(model, start, next(distillation._cases(asked(1))))
    layer = max(start.maps)
    down, up = start.maps[layer]
    up = up.clone().requires_grad_()
    [slope] = torch.autograd.grad(documents.loss({**start.maps, layer: (down, up)}), [up])
    slope[:, slope.shape[1] // 2 :] = 0  # of K alone, which is turned
    step = 0.1 * up.detach().norm() * slope / slope.norm()
    with torch.no_grad():
        higher, lower = (float(documents.loss({**start.maps, layer: (down, up + sign * step)})) for sign in (1, -1))
    assert higher - lower == pytest.approx(2 * float((slope * step).sum()), rel=0.05)


def test_steps_make_the_divergence_smaller_and_leave_the_model_as_it_was(shared_model, monkeypatch):
    monkeypatch.setattr(distillation, "RATE", 0.01)
    model = shared_model("llama")
    before = [part.detach().clone() for part in model.parameters()]
    one = list(asked(1))  # behind another first token it is another step
    prompts = [([number + 3, *ids[1:]], spans) for number in range(12 + HELD_OUT) for ids, spans in one]
    model.train()
    try:
        found = distilled(model, correction_of(model), prompts)
        assert model.training
    finally:
        model.eval()
    assert found.trained < 0.95 * found.fitted
    assert all(
        part.grad is None and torch.equal(part, was) for part, was in zip(model.parameters(), before, strict=True)
    )


def test_trained_correction_is_saved_and_is_of_other_keys(shared_model, tmp_path):
    model = shared_model("llama")
    start = correction_of(model, chunk_prefix_ids=(*default_sink(model), *random_ids(6, 3)))
    found = distilled(model, start, asked(HELD_OUT + 2)).correction
    found.save(tmp_path / "trained")
    assert ContextCorrection.load(tmp_path / "trained").digest == found.digest != start.digest
    assert found.prefix == start.prefix


def test_few_prompts_prompts_without_a_question_and_models_with_states_are_refused(shared_model):
    model = shared_model("llama")
    start = correction_of(model)
    with pytest.raises(ConfigError, match=f"more than {HELD_OUT}"):
        distilled(model, start, asked(HELD_OUT))
    with pytest.raises(ConfigError, match="question"):
        distilled(model, start, [(ids[: spans[-1].stop], spans) for ids, spans in asked(HELD_OUT + 1)])
    with pytest.raises(ConfigError, match="fitted for the model"):
        distilled(shared_model("gpt_neox"), start, asked(HELD_OUT + 1))
    hybrid = shared_model("qwen3_next")
    with pytest.raises(UnsupportedModelError, match="state"):
        distilled(hybrid, replace(start, model=""), asked(HELD_OUT + 1))


def test_made_prompts_with_the_same_texts_and_other_questions_are_in_a_row(mistral_tokenizer):
    texts = [f"The town of Ellis {number} was built by John Smith in the year 18{number}." for number in range(12)]
    made = list(made_documents(texts, 3, 2))
    prompts = list(prompts_of(mistral_tokenizer, made))
    chunks = [tuple(span.token_ids for span in spans) for _, spans in prompts]
    assert len(prompts) == 6
    assert chunks[0] == chunks[1] != chunks[2] == chunks[3] != chunks[4] == chunks[5]
    assert len({tuple(ids) for ids, _ in prompts}) > 3
    assert all(len(set(one.texts)) == DOCUMENTS for one in made)
    assert len({text for one in made for text in one.texts}) == len(texts), "all are used before one is used again"


def test_rows_of_a_file_are_asked_their_own_question_and_those_of_others(tmp_path):
    rows = [{"chunks": [f"text {number}", "both"], "question": f"question {number}"} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_documents(tmp_path / "rows.jsonl", 4, 3)
    assert [one.texts for one in found] == [(f"text {number}", "both") for number in range(4)]
    assert [one.questions[0] for one in found] == [f"question {number}" for number in range(4)]
    assert {len(one.questions) for one in found} == {3}
    assert {question for one in found for question in one.questions} <= {f"question {number}" for number in range(4)}


def test_command_trains_on_prompts_of_ones_own_and_says_what_it_brought(tmp_path, model_folder, run):
    rows = [
        {"chunks": [f"The mill of town {number} closed.", f"River {number} is long."], "question": f"Who {number}?"}
        for number in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--model", model_folder, "--prompts", tmp_path / "rows.jsonl", "--output", tmp_path / "file")
    code, out, _ = run("fit", *words, "--json")
    found = json.loads(out)
    assert (code, found["texts"]) == (0, 6)
    assert {"alone", "fitted", "trained"} == found["divergence"].keys()
    assert ContextCorrection.load(tmp_path / "file").model == found["model"]
    code, out, _ = run("fit", *words, "--questions", 0, "--json")
    assert (code, json.loads(out)["divergence"]) == (0, None)
    code, _, err = run("fit", tmp_path, *words)
    assert code == 2
    assert "one of them" in err
