# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a score promises: 0 to 1 for a prediction beside one right answer; the best over all right answers counts.

A rule that fails is an error, never a 0. Departures from the published scripts, which score what they should not:
"Norway" does not begin with the word "No", the word alone counts only beside an answer of yes or no ("No Doubt" is a
band), and an empty prediction scores 0 instead of ending the run.
"""

import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

from hf_blend.errors import PromptError, import_extra


class Score(ABC):
    """A rule."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def score(self, prediction: str, answer: str) -> float:
        """Score a prediction beside one right answer, 0 to 1."""

    def best(self, prediction: str, answers: Sequence[str]) -> float:
        """Score a prediction beside all right answers; the best counts."""
        if isinstance(answers, str) or not answers:
            raise PromptError(f"the right answers are {answers!r}, expected a list of one text or more.")
        if not prediction.strip():
            return float(any(not answer.strip() for answer in answers))
        return max(self.score(prediction, answer) for answer in answers)


class Rouge(Score):
    """A rule over longest common subsequences of stems (rouge-score)."""

    @cached_property
    def _scorer(self) -> Any:
        rouge = import_extra("rouge_score.rouge_scorer", extra="eval", needed_by="ROUGE-L")
        return rouge.RougeScorer(["rougeL"], use_stemmer=True)

    def f_measure(self, prediction: str, answer: str) -> float:
        """Harmonic mean of the subsequence's shares of both texts."""
        return float(self._scorer.score(answer, prediction)["rougeL"].fmeasure)


def first_line(text: str) -> str:
    """What stands before the first line break, after those at the beginning."""
    return text.lstrip("\n").split("\n", 1)[0]


def short_answer(prediction: str, answer: str) -> str:
    """What counts of a prediction beside a short answer, in SQuAD's form."""
    said = normalised(first_line(prediction.lstrip()))
    first = said.split(" ", 1)[0]
    return first if {first, normalised(answer)} <= {"yes", "no"} else said


def normalised(text: str) -> str:
    """SQuAD's form: small letters, no ASCII punctuation, no articles, single spaces."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def f1(prediction: Sequence[Hashable], answer: Sequence[Hashable]) -> float:
    """Harmonic mean of precision and recall of a multiset overlap; two empty sides agree, one alone does not."""
    if not prediction or not answer:
        return float(not prediction and not answer)
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0
