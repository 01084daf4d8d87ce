# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Scores: every rule by hand, with every trap of the published scripts."""

import re
import sys

import pytest

from hf_blend import plugins
from hf_blend.errors import MissingExtraError, PromptError


class Letters:
    """A tokenizer to count by hand with: every letter that is no space is a token; BOS is asked for by default."""

    @staticmethod
    def encode(text, add_special_tokens=True):
        return [1] * add_special_tokens + list(text.replace(" ", "").encode())


def score(name, tokenizer=None):
    return plugins.load("evaluation.scores", name)(tokenizer)


def scored(name, prediction, *answers, tokenizer=Letters):
    rule = score(name, tokenizer)
    return rule.best(prediction, answers)


RULES = ("containment", "exact-match", "rouge-l", "rouge-l-whole", "subword-f1", "word-f1")


@pytest.mark.parametrize("name", RULES)
def test_answer_itself_scores_1_something_else_less_and_best_of_all_answers_counts(name):
    assert scored(name, "Radio City", "Radio City") == 1
    assert scored(name, "Boston", "Radio City") < 0.5
    assert scored(name, "Istanbul", "Constantinople", "Istanbul") == 1


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("blank", ["", " \n\t"])
def test_empty_prediction_scores_0_whatever_answer_is_reduced_to(name, blank):
    assert scored(name, blank, "Radio City") == 0
    assert scored(name, blank, "?!") == 0
    assert scored(name, blank, "Radio City", "") == 1


@pytest.mark.parametrize("answers", [(), "Ozalj"])
def test_one_text_in_place_of_list_of_answers_is_error_and_not_score_of_its_letters(answers):
    with pytest.raises(PromptError, match=re.escape(repr(answers))):
        score("word-f1").best("O", answers)


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("the cat sat.", "Cat", 2 / 3),  # {cat, sat} and {cat}
        ("The", "A", 1.0),  # two empty sides
        ("Band", "The", 0.0),
    ],
)
def test_word_f1_by_hand(prediction, answer, f1):
    assert scored("word-f1", prediction, answer) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "f1"),
    [
        ("The aab", "ab", 4 / 5),
        ("Norway", "Norway", 1 / 2),  # counts as "no": n and o of norway
        (" No, both", "no", 1.0),  # this rule looks at the first word
    ],
)
def test_published_subword_f1_by_hand_its_faults_included(prediction, answer, f1):
    assert scored("subword-f1", prediction, answer) == pytest.approx(f1, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "prediction", "answer", "right"),
    [
        ("containment", "The answer is: Radio-City,\nin New York.", "the radiocity", 1),
        ("containment", "Norway", "No", 0),
        ("exact-match", "an  on-stage\tdeath!", "ONSTAGE death", 1),  # punctuation goes, nothing stands in its place
        ("exact-match", "Niksic", "Nikšić", 0),  # accents stay
    ],
)
def test_containment_and_exact_match_by_hand(name, prediction, answer, right):
    assert scored(name, prediction, answer) == right


@pytest.mark.parametrize(
    ("prediction", "answer", "f_measure"),
    [
        ("the cat sat on the mat", "the cat is on the mat", 5 / 6),
        ("cats running", "cat runs", 1.0),  # stems
        ("mat the on", "on the mat", 1 / 3),  # order counts
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
