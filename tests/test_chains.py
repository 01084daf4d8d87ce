# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chain world and its model: stories say what they claim, and the model needs what other chunks say."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

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
