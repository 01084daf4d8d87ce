# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The instruments of the tests: stories say what they claim, and their models need what other chunks say."""

from itertools import islice
from random import Random

import pytest
import torch
from world_scoring import score_examples
from worlds import CHAIN_TASK, CHAINS, REFERENCE, REFERENCE_TASK, reference_questions
from worlds.chains import sampling as chains
from worlds.chains import tokens as chain_tokens
from worlds.chains.words import KIND_OF
from worlds.world import tokens
from worlds.world.sampling import Example, sample_examples
from worlds.world.story import Level, tell

from hf_blend import ConfigError, plugins
from hf_blend.evaluation.bundled import load_model


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


@pytest.mark.parametrize("draw", [sample_examples, chains.sample_examples])
def test_the_same_seed_gives_the_same_examples_and_an_unknown_split_is_refused(draw):
    assert draw(5, seed=3) == draw(5, seed=3) != draw(5, seed=4)
    with pytest.raises(ConfigError, match=r"'test'|expected one of train, heldout"):
        draw(1, seed=0, split="test")


def test_what_leans_on_another_chunk_does_not_name_its_subject():
    random = Random(2)
    for _ in range(20):
        story = tell(random, Level(), heldout=True)
        for fact in story.facts:
            assert (fact.subject in story.chunks[fact.chunk]) == (fact.told_by == "explicit")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_owner_can_be_read_from_the_text_alone(split):
    for example in chains.sample_examples(20, seed=3, split=split):
        assert read_back(example.chunks)[example.question.split()[3]] == example.answer


@pytest.mark.parametrize(("folder", "world"), [(REFERENCE, tokens), (CHAINS, chain_tokens)])
def test_the_tokenizer_of_the_model_is_the_one_that_the_world_builds(folder, world):
    tokenizer = load_model(folder)[1]
    assert tokenizer.get_vocab() == world.build_tokenizer().get_vocab() == world.vocabulary()


def test_the_reference_model_reads_across_chunks_and_full_reuse_does_not(reference):
    model, tokenizer = reference
    scores = score_examples(model, sample_examples(60, seed=11))
    assert scores["full"]["all"] >= 0.9
    assert scores["reuse"]["all"] <= 0.7
    named = [{key: one[key] for key in one if key != "story"} for one in reference_questions()]
    asked = [Example(**{**one, "chunks": tuple(one["chunks"])}) for one in named]
    scores = score_examples(model, asked)
    assert (scores["full"]["all"], len(asked)) == (1, 16)
    assert scores["reuse"]["all"] <= 0.25
    ids = torch.tensor([tokenizer.encode("".join(asked[0].prompt_pieces))])
    output = model.generate(ids, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip() == asked[0].answer


@pytest.mark.parametrize("path", [REFERENCE_TASK, CHAIN_TASK])
def test_a_task_may_be_a_file(path):
    task = plugins.load("evaluation.tasks", path)(load_model(REFERENCE if path == REFERENCE_TASK else CHAINS)[1])
    for row, sample in zip(islice(task.rows(), 3), task.samples(3), strict=True):
        assert (sample.id, sample.answers) == (row["id"], tuple(row["answers"]))
        assert sample.chunks == tuple(task.ids(chunk) for chunk in row["chunks"])
