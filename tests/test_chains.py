# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chain world and its model: stories say what they claim, and the model needs what other chunks say."""

import json
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import draft
import pytest
import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bundled import CHAINS, load_model
from hf_blend.evaluation.chains.sampling import links, sample_examples, texts
from hf_blend.evaluation.chains.story import Level, tell
from hf_blend.evaluation.chains.tokens import build_tokenizer, vocabulary
from hf_blend.evaluation.chains.words import KIND_OF, UNSEEN_ADJECTIVES, UNSEEN_NOUNS
from hf_blend.evaluation.scores.answer_match import AnswerMatch
from hf_blend.evaluation.scores.sentence_f1 import SentenceF1
from hf_blend.evaluation.tasks.chain_links import ChainLinks

ROOT = Path(__file__).resolve().parent.parent
GATES = ROOT / "benchmarks" / "results" / "reference2_gates.json"
SHORT = Level(chunks=(3, 6), facts=(1, 3), fillers=(0, 1))


def read_back(chunks):
    """The owner of every thing, found from the text alone: an oracle that knows nothing of how it was written."""
    owners, last = {}, {}
    for sentence in " ".join(chunks).split(" ."):
        words = sentence.split()
        if words[:1] != ["the"] or words[1] not in KIND_OF:
            continue
        owners[words[1]] = owners[last[words[-1]]] if "that" in words else words[-1]
        last[KIND_OF[words[1]]] = words[1]
    return owners


def told_by(chunks, thing):
    """The sentences that lead from a thing to its owner, found from the text alone."""
    sentences = [f"{one.strip()} ." for one in " ".join(chunks).split(" .") if one.strip()]
    told = {one.split()[1]: one for one in sentences if one.split()[0] == "the" and one.split()[1] in KIND_OF}
    found = [told[thing]]
    while "that" in found[-1].split():
        kind = found[-1].split()[-2]
        found.append(next(told[one] for one in told if KIND_OF[one] == kind))
    return " ".join(found)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_chain_can_be_read_from_the_text_alone(split):
    for example in sample_examples(20, seed=4, split=split):
        assert example.chain == told_by(example.chunks, example.question.split()[3])
        assert example.chain.split()[-2] == example.answer
        assert example.chain.count(" .") == example.depth + 1


def test_a_whole_chain_is_right_and_a_part_of_it_is_partly_right():
    tokenizer = build_tokenizer()
    task = ChainLinks(tokenizer)
    rule, whole = SentenceF1(), AnswerMatch()
    for row, sample in zip(islice(task.rows(), 10), task.samples(10), strict=True):
        text, depth = row["answers"][0], int(row["id"][-1])
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) < task.max_new_tokens, "and its end fits"
        said = tokenizer.decode(ids)
        assert rule.best(said, sample.answers) == whole.best(said, sample.answers) == 1
        first, other = tokenizer.decode(ids[: ids.index(ids[-1]) + 1]), said.replace("the", "a", 1)
        assert rule.best(first, sample.answers) == pytest.approx(2 / (depth + 2)), "one sentence of depth + 1"
        assert rule.best(other, sample.answers) == pytest.approx(depth / (depth + 1)), "one word is wrong"
        assert whole.best(other, sample.answers) == 0


@pytest.mark.parametrize("name", ["draft", "target"])
def test_packed_questions_are_predicted_as_each_alone(name):
    torch.manual_seed(0)
    model = draft.build(draft.PLANS[name].width).eval()
    batch = draft.draw(Random(3), draft.Stage(draft.SHORT, 64, 96, 2, 1))
    with torch.no_grad():
        logits, labels = draft.predicted(model, batch)
        expected, answers = [], []
        for row in range(2):
            told = batch.ids[row, batch.owners[row] == 0]
            for number in range(1, int(batch.owners[row].max()) + 1):
                text = batch.ids[row, batch.owners[row] == number]
                alone = model(torch.cat((told, text))[None]).logits[0, len(told) + 4 : -1]
                expected.append(alone)
                answers.append(text[5:])
    assert len(answers) > 3
    assert torch.equal(labels, torch.cat(answers))
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_training_of_the_draft_resumes_from_its_checkpoint_and_writes_a_model(tmp_path, monkeypatch):
    stages = (draft.Stage(draft.SHORT, 64, 64, 1, 2), draft.Stage(draft.SHORT, 80, 64, 1, 1))
    plan = replace(draft.PLANS["draft"], cycles=(stages, stages[:1]))
    monkeypatch.setitem(draft.PLANS, "draft", plan)
    assert [plan.at(step) for step in range(6)] == [
        (stages[0], 0), (stages[0], 1 / 3), (stages[1], 2 / 3), (stages[0], 0), (stages[0], 1 / 2), (stages[0], 1)
    ]  # fmt: skip
    trainer = draft.Trainer("draft", tmp_path)
    trainer.run()
    again = draft.Trainer("draft", tmp_path)
    assert (again.step, again.tokens) == (5, trainer.tokens) == (5, 4 * 128 + 144)
    before, after = trainer.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again.export(tmp_path / "model")
    model, tokenizer = load_model(str(tmp_path / "model"))
    assert tokenizer.get_vocab() == load_model("chains")[1].get_vocab()
    ids = torch.tensor([[0, 5, 9, 40]])
    torch.testing.assert_close(model(ids).logits, again.model(ids).logits)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_answer_can_be_read_from_the_text_alone(split):
    for example in sample_examples(20, seed=3, split=split):
        assert read_back(example.chunks)[example.question.split()[3]] == example.answer


def test_a_training_story_holds_nothing_that_is_held_out():
    for seed in range(30):
        story = tell(Random(seed), SHORT)
        assert not any(fact.is_held_out for fact in story.facts)
        assert not {word for chunk in story.chunks for word in chunk} & {*UNSEEN_NOUNS, *UNSEEN_ADJECTIVES}


def test_held_out_examples_ask_for_what_training_never_saw():
    asked = sample_examples(25, seed=1)
    assert {example.depth for example in asked} == {0, 1, 2, 3, 4}
    assert sample_examples(25, seed=1) == asked
    with pytest.raises(ConfigError, match="expected one of train, heldout"):
        sample_examples(1, seed=1, split="test")


def test_the_places_of_the_links_are_those_of_the_kinds_that_are_leant_on():
    story = tell(Random(5), SHORT)
    for words, places in zip(story.chunks, links(story), strict=True):
        assert [words[place] for place in places] == [b for a, b in pairwise(words) if a == "that"]


def test_every_chunk_is_long_enough_to_be_stored_alone():
    shortest = min(len(chunk.split()) for example in sample_examples(20, 1) for chunk in example.chunks)
    assert shortest >= 32


def test_the_tokenizer_gives_one_token_per_word_whole_or_in_pieces():
    tokenizer, ids = build_tokenizer(), vocabulary()
    chunks = texts(tell(Random(1), SHORT))
    for chunk in chunks:
        assert tokenizer.encode(chunk, add_special_tokens=False) == [ids[word] for word in [*chunk.split(), "\n"]]
    whole = tokenizer.encode("".join(chunks), add_special_tokens=False)
    assert whole == [token for chunk in chunks for token in tokenizer.encode(chunk, add_special_tokens=False)]


@pytest.fixture(scope="module")
def chains():
    return load_model("chains")


def right(model, tokenizer, store, example, config):
    """Whether the next token is the answer."""
    cache = BlendCache(model, store, config or BlendConfig())
    inputs = cache.inputs(tokenizer, prefix=None, chunks=list(example.chunks), question=example.question)
    with torch.no_grad():
        logits = model(**inputs, past_key_values=cache if config else None, logits_to_keep=1).logits[0, -1]
    return tokenizer.decode([int(logits.argmax())]) == example.answer


@pytest.mark.slow
def test_the_model_answers_better_blended_than_reused(chains):
    store = ChunkStore.open("memory://")
    asked = [example for example in sample_examples(20, seed=4) if example.crossings][:10]
    count = {
        name: sum(right(*chains, store, example, config) for example in asked)
        for name, config in {
            "full": None,
            "reuse": BlendConfig(selector="none", recompute_ratio=0.0),
            "blend": BlendConfig(recompute_ratio=0.15),
        }.items()
    }
    assert count["full"] >= 6, count  # see the gates in the card: it is not trained to the end
    assert count["reuse"] + 3 <= count["blend"], count


def test_the_file_of_gates_has_every_gate_and_says_which_holds():
    made = json.loads(GATES.read_text("utf-8"))
    assert len(made["gates"]) == 8
    for gate in made["gates"]:
        side, bound = gate["expected"].rsplit(" ", 1)
        holds = gate["figure"] >= float(bound) if side == "at least" else gate["figure"] <= float(bound)
        assert gate["holds"] == holds, gate
    methods = {row["method"] for row in made["emulation"]}
    assert {"full prefill", "full reuse", "links only", *(f"fresh in layers 0-{last}" for last in range(8))} <= methods
    assert all(row["n"] >= 500 for row in made["emulation"] + made["library"])


def test_the_card_says_what_the_gates_measured():
    card = (ROOT / "model_cards" / "chains.md").read_text("utf-8")
    for gate in json.loads(GATES.read_text("utf-8"))["gates"]:
        assert f"{gate['figure']:.3f}" in card, gate


def test_the_model_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in Path(CHAINS).iterdir()) < 25_000_000
