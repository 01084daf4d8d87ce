# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a score promises: 0 to 1 for a prediction beside one right answer; the best over all right answers counts.

A rule that fails is an error, never a 0. Departures from the published scripts, both of which score what they should
not: "Norway" does not begin with the word "No", and an empty prediction scores 0 instead of ending the run.
"""

import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any


class Score(ABC):
    """A rule."""

    def __init__(self, tokenizer: Any = None) -> None:
        """Keep what the rule may need.

        Args:
            tokenizer: the model's, for rules over its tokens.
        """
        self.tokenizer = tokenizer

    @abstractmethod
    def one(self, prediction: str, answer: str) -> float:
        """Score a prediction beside one right answer, 0 to 1."""

    def best(self, prediction: str, answers: Sequence[str]) -> float:
        """Score a prediction beside all right answers; the best counts."""
        return max(self.one(prediction, answer) for answer in answers)


def first_line(text: str) -> str:
    """What stands before the first line break, after those at the beginning."""
    return text.lstrip("\n").split("\n", 1)[0]


def yes_or_no(text: str) -> str:
    """A prediction whose first word is yes or no counts as that word alone."""
    word = text.split()[0].strip(string.punctuation).lower() if text.split() else ""
    return {"yes": "Yes", "no": "No"}.get(word, text)


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
