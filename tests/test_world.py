# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference world, its tokenizer and the model that is shipped with the package."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from world_batches import attention_mask, collate, pack, story_row
from world_model import build_model
from world_scoring import score_examples

import hf_blend
from hf_blend.errors import ConfigError
from hf_blend.evaluation.world import sample_examples
from hf_blend.evaluation.world.sampling import KIND_WEIGHTS, examples_of, questions
from hf_blend.evaluation.world.story import Level, Story, tell
from hf_blend.evaluation.world.tokens import build_tokenizer, encode, vocabulary
from hf_blend.evaluation.world.words import CLOSERS, PHRASES, is_heldout, phrase_index, subject_index

BUNDLED = Path(hf_blend.__file__).resolve().parent / "bundled"
MODEL = BUNDLED / "reference"


@pytest.fixture(scope="module")
def reference():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def endings(story: Story) -> set[tuple[str, str]]:
    """Give the (closer, phrase) pairs of a story."""
    found = set()
    for sentence in " ".join(story.chunks).replace("\n", "").replace(".", " . ").split(" . "):
        last = (sentence.split() or [""])[-1]
        closer = last if last in CLOSERS else ""
        for pair in PHRASES.values():
            for phrase in pair:
                said = phrase.removeprefix("{s} ").removesuffix(" {v}")
                if f" {said} " in sentence:
                    found.add((closer, phrase))
    return found


def test_the_same_seed_gives_the_same_examples():
    assert sample_examples(20, seed=3) == sample_examples(20, seed=3)
    assert sample_examples(20, seed=3) != sample_examples(20, seed=4)


def test_an_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'test'.*train, heldout"):
        sample_examples(1, seed=0, split="test")


@pytest.mark.parametrize("heldout", [False, True])
def test_a_story_uses_the_pairs_of_its_split_only(heldout):
    from hf_blend.evaluation.world.words import VALUES

    random = Random(0)
    for _ in range(100):
        story = tell(random, Level(), heldout)
        for fact in story.facts:
            place = VALUES[fact.relation].index(fact.value)
            assert is_heldout(subject_index(fact.subject), place) == heldout
        numbers = {phrase: phrase_index(name, i) for name, pair in PHRASES.items() for i, phrase in enumerate(pair)}
        pairs = endings(story)
        assert pairs
        assert all(is_heldout(CLOSERS.index(closer), numbers[phrase]) == heldout for closer, phrase in pairs)


def test_every_kind_of_question_is_asked_about_as_often_as_stated():
    examples = sample_examples(400, seed=0)
    for kind, share in KIND_WEIGHTS.items():
        assert sum(example.kind == kind for example in examples) / 400 == pytest.approx(share, abs=0.08)


def test_an_answer_is_told_in_the_story_and_not_in_the_question():
    for example in sample_examples(200, seed=1):
        assert encode(example.answer)[0] in encode("".join(example.chunks))
        assert example.answer not in example.question


def test_what_leans_on_another_chunk_does_not_name_its_subject():
    random = Random(2)
    for _ in range(100):
        story = tell(random, Level(), heldout=True)
        for fact in story.facts:
            assert (fact.subject in story.chunks[fact.chunk]) == (fact.told_by == "explicit")


def test_the_number_of_chunks_about_a_person_varies():
    random = Random(0)
    stories = [tell(random, Level(), heldout=False) for _ in range(50)]
    assert len({len(story.chunks) for story in stories}) > 5


def test_two_hop_questions_do_not_name_the_subject_of_the_answering_fact():
    random = Random(5)
    for _ in range(50):
        story = tell(random, Level(), heldout=True)
        owners = {fact.value: fact.subject for fact in story.facts}
        joined = [question for question in questions(story) if question.hops == 2]
        assert all(owners[question.answer] not in question.text for question in joined)


def test_the_quick_encoder_equals_the_tokenizer_whole_or_in_pieces():
    tokenizer = build_tokenizer()
    for example in sample_examples(50, seed=2):
        pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in example.prompt_pieces]
        assert pieces == [encode(piece) for piece in example.prompt_pieces]
        assert tokenizer.encode("".join(example.prompt_pieces)) == [tokenizer.bos_token_id, *sum(pieces, [])]


def test_decoding_gives_the_text_back():
    tokenizer = build_tokenizer()
    text = "".join(sample_examples(1, seed=0)[0].prompt_pieces)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_no_word_is_unknown():
    assert vocabulary()["<unk>"] not in encode("".join(sample_examples(1, seed=5)[0].prompt_pieces))


def test_packed_questions_get_the_same_logits_as_each_alone():
    model = build_model().eval()
    random = Random(0)
    story = tell(random, Level(), heldout=False)
    asked = questions(story)[:4]
    packed = pack(story, asked, 400, 0.0)
    for question, (place, _) in zip(asked, packed.asked, strict=True):
        alone = pack(story, [question], 400, 0.0)
        logits = []
        for row, at in ((packed, place), (alone, alone.asked[0][0])):
            batch = collate([row], len(row.ids))
            output = model(batch.ids, attention_mask=attention_mask(batch), position_ids=batch.positions)
            logits.append(output.logits[0, at])
        torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_reuse_hides_other_chunks_from_chunks_but_not_from_questions():
    batch = collate([story_row(Random(0), Level(), 256, heldout=False)], 256)
    full, reuse = attention_mask(batch)[0, 0], attention_mask(batch, reuse=True)[0, 0]
    asking = batch.question[0] > 0
    assert torch.equal(full[asking], reuse[asking])
    told = batch.chunk[0] > 0
    seen = reuse[told][:, told]
    assert torch.equal(seen.any(-1), torch.ones_like(seen.any(-1)))
    assert not (seen & (batch.chunk[0][told][:, None] != batch.chunk[0][told][None])).any()


def test_the_weights_are_small_enough_to_ship():
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000


def test_the_shipped_model_is_a_stock_llama_with_grouped_queries_and_enough_layers(reference):
    config = reference.config
    assert type(reference).__name__ == "LlamaForCausalLM"
    assert config.num_hidden_layers >= 8
    assert config.num_key_value_heads < config.num_attention_heads


def test_the_shipped_tokenizer_is_the_one_that_the_world_builds(tokenizer):
    assert tokenizer.get_vocab() == vocabulary()
    text = "".join(sample_examples(1, seed=9)[0].prompt_pieces)
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *encode(text)]


def test_the_shipped_model_reads_across_chunks_and_full_reuse_does_not(reference):
    scores = score_examples(reference, sample_examples(60, seed=11))
    assert scores["full"]["all"] >= 0.9
    assert scores["reuse"]["all"] <= 0.7


def test_the_shipped_model_generates_the_answer_and_stops(reference, tokenizer):
    examples = sample_examples(20, seed=12)
    right = 0
    for example in examples:
        pieces = [tokenizer.encode(piece, add_special_tokens=False) for piece in example.prompt_pieces]
        ids = torch.tensor([[tokenizer.bos_token_id, *sum(pieces, [])]])
        output = reference.generate(ids, attention_mask=torch.ones_like(ids))
        right += tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip() == example.answer
    assert right >= 17


def test_the_documents_fail_under_reuse_and_not_under_full_prefill(reference):
    from hf_blend.evaluation.world import Example

    records = json.loads((BUNDLED / "documents" / "questions.json").read_text())
    examples = []
    for record in records:
        story = record.pop("story")
        example = replace(Example(**record), chunks=tuple(record["chunks"]))
        texts = [file.read_text() for file in sorted((BUNDLED / "documents" / f"story_{story}").glob("*.txt"))]
        assert tuple(texts) == example.chunks
        examples.append(example)
    scores = score_examples(reference, examples)
    assert len(examples) >= 12
    assert scores["full"]["all"] == 1
    assert scores["reuse"]["all"] <= 0.25


def test_a_story_has_one_example_per_question():
    story = tell(Random(0), Level(), heldout=True)
    assert [example.answer for example in examples_of(story)] == [question.answer for question in questions(story)]
