# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Scores: every rule by hand, every trap of the published scripts, and the published means from recorded answers."""

import csv
import re
import statistics
import sys

import pytest

from hf_blend import plugins
from hf_blend.errors import MissingExtraError, PromptError
from hf_blend.evaluation.rows import read_rows


class Letters:
    """A tokenizer to count by hand with: every letter that is no space is a token; BOS is asked for by default."""

    @staticmethod
    def encode(text, add_special_tokens=True):
        return [1] * add_special_tokens + list(text.replace(" ", "").encode())


def score(name, tokenizer=None):
    return plugins.load("evaluation.scores", name)(tokenizer)


def scored(name, prediction, *answers, tokenizer=Letters):
    return score(name, tokenizer).best(prediction, answers)


RULES = ("containment", "exact-match", "rouge-l", "rouge-l-whole", "subword-f1", "word-f1")


@pytest.mark.parametrize("name", RULES)
def test_answer_itself_scores_1_something_else_less_and_best_of_all_answers_counts(name):
    assert scored(name, "Radio City", "Radio City") == 1
    assert scored(name, "Boston", "Radio City") < 0.5
    assert scored(name, "Istanbul", "Constantinople", "Istanbul") == 1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("blank", ["", " ", "\n", " \n\t"])
def test_empty_prediction_scores_0_whatever_answer_is_reduced_to(name, blank):
    assert scored(name, blank, "Radio City") == 0
    assert scored(name, blank, "?!") == 0
    assert scored(name, blank, "Radio City", "") == 1


def test_answer_is_contained_where_its_words_stand_together():
    assert scored("containment", "The answer is: Radio-City,\nin New York.", "the radiocity") == 1
    assert scored("containment", "It was in New\n\nYork.", "New York") == 1
    assert scored("containment", "Radio in the city", "Radio City") == 0
    assert scored("containment", "Norway", "No") == 0


@pytest.mark.parametrize("answers", [(), [], "Ozalj"])
def test_one_text_in_place_of_list_of_answers_is_error_and_not_score_of_its_letters(answers):
    with pytest.raises(PromptError, match=re.escape(repr(answers))):
        score("word-f1").best("O", answers)


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("the cat sat.", "Cat", 2 / 3),  # {cat, sat} and {cat}
        ("a b b", "b b c", 4 / 5),  # articles go; b twice in both
        ("b b b", "b", 1 / 2),  # a multiset: three said, one right
        ("The", "A", 1.0),  # two empty sides
        ("The", "Band", 0.0),
        ("Band", "The", 0.0),
    ],
)
def test_word_f1_by_hand(prediction, answer, f1):
    assert scored("word-f1", prediction, answer) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "right"),
    [
        ("an  on-stage\tdeath!", "ONSTAGE death", 1),  # punctuation goes, nothing stands in its place
        ("Niksic", "Nikšić", 0),  # accents stay
        ("Theatre", "atre", 0),  # an article is a whole word
        (" \n Paris \n\nLyon", "Paris", 1),
    ],
)
def test_exact_match_by_hand(prediction, answer, right):
    assert scored("exact-match", prediction, answer) == right


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("The aab", "ab", 4 / 5),
        ("Norway", "Norway", 1 / 2),  # counts as "no": n and o of norway
        ("Yes, both", "yes", 1.0),
        (" Yes, both", "yes", 3 / 5),  # behind a space the rule does not see it
        (" No, both", "no", 1.0),  # this rule looks at the first word
        (" \nabc", "abc", 0.0),  # a first line of one space
        ("a1", "a2", 1 / 2),  # BOS would make it 2/3, cutting a token 0
    ],
)
def test_published_subword_f1_by_hand_its_faults_included(prediction, answer, f1):
    assert scored("subword-f1", prediction, answer) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "f_measure"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 5 / 6),
        ("cats running", "cat runs", 1.0),  # stems
        ("mat the on", "on the mat", 1 / 3),  # order counts
        ("a b", "a b c d", 2 / 3),
    ],
)
def test_rouge_l_by_hand(prediction, answer, f_measure):
    pytest.importorskip("rouge_score")
    assert scored("rouge-l", prediction, answer) == pytest.approx(f_measure, abs=1e-12)
    assert scored("rouge-l-whole", prediction, answer) == pytest.approx(f_measure, abs=1e-12)


def test_rule_that_fails_or_lacks_its_library_is_error_and_not_0(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingExtraError, match=r"hf-blend\[eval\]"):
        scored("rouge-l", "Ann", "Ann")

    class Broken:
        def encode(self, text, add_special_tokens=True):
            raise OverflowError(text)

    with pytest.raises(OverflowError):
        scored("subword-f1", "Ann", "Ann", tokenizer=Broken())


def recorded(folder, name):
    """The answers of a published log and the mean that stands at its end."""
    path = folder / "recorded" / f"{name}.txt"
    if not path.is_file():
        pytest.skip(f"no log of published answers at {path}")
    text = path.read_text("utf-8")
    said = re.findall(r"^generation: (.*)", text, re.M)
    (mean,) = re.findall(r"^Avg F1: (\S+)", text, re.M)
    return said, float(mean)


def musique(folder):
    return [row["answers"] for row in read_rows(folder / "musique_cacheblend.jsonl")]


def wikimqa(folder):
    path = folder / "2wikimqa_gold_audit.csv"
    with path.open(encoding="utf-8", newline="") as opened:
        return [[row["original_gold"]] for row in csv.DictReader(opened)]


@pytest.mark.parametrize("answers", [musique, wikimqa])
def test_recorded_answers_score_published_mean(published, mistral_tokenizer, answers):
    said, mean = recorded(published, answers.__name__)
    rule = score("subword-f1", mistral_tokenizer)
    right = answers(published)
    assert len(said) == len(right)
    scores = map(rule.best, said, right)
    assert statistics.fmean(scores) == pytest.approx(mean, abs=1e-9)


def test_word_f1_of_recorded_answers_is_what_others_count(published):
    said, _ = recorded(published, "musique")
    rule = score("word-f1")
    assert statistics.fmean(map(rule.best, said, musique(published))) == pytest.approx(0.2421, abs=5e-5)
