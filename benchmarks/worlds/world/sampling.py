# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions about stories, and examples of both for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from hf_blend.errors import ConfigError

from .story import Fact, Level, Story, tell
from .words import QUESTIONS, TOWN_OF, TOWN_RELATIONS

KIND_WEIGHTS = {"explicit": 0.20, "pronoun": 0.35, "role": 0.10, "town": 0.10, "two-hop": 0.25}
SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Question:
    """A question about a story; `kind` says how the asked fact is told, or that two facts must be joined."""

    text: str
    answer: str
    hops: int
    kind: str


@dataclass(frozen=True)
class Example:
    """One prompt in pieces and its answer.

    Tokenise each piece alone with `add_special_tokens=False`, put the BOS token in front, and join.
    """

    prefix: str
    chunks: tuple[str, ...]
    question: str
    answer: str
    hops: int
    kind: str

    @property
    def prompt_pieces(self) -> tuple[str, ...]:
        """The prefix, the chunks and the question, in prompt order."""
        return (self.prefix, *self.chunks, self.question)


def questions(story: Story) -> list[Question]:
    """List every question that a story answers, in the order of its facts."""
    roles = {fact.subject: fact.value for fact in story.facts if fact.relation == "role"}
    owners = {fact.value: fact.subject for fact in story.facts if fact.relation == "home"}
    found = []
    for fact in story.facts:
        found.append(_ask(fact, fact.subject, 1, fact.told_by))
        if fact.relation in TOWN_RELATIONS and fact.subject in owners:
            found.append(_ask(fact, TOWN_OF.format(s=owners[fact.subject]), 2, "two-hop"))
        elif fact.subject in roles and fact.relation != "role" and fact.told_by != "role":
            found.append(_ask(fact, f"the {roles[fact.subject]}", 2, "two-hop"))
    return found


def examples_of(story: Story) -> list[Example]:
    """List one example per question that a story answers."""
    return [Example("", story.chunks, one.text, one.answer, one.hops, one.kind) for one in questions(story)]


def _ask(fact: Fact, subject: str, hops: int, kind: str) -> Question:
    return Question(QUESTIONS[fact.relation].format(s=subject), fact.value, hops, kind)


def sample_examples(count: int, seed: int, split: str = "heldout") -> list[Example]:
    """Draw examples, one question per story, with kinds in the shares of `KIND_WEIGHTS`.

    Only contested answers are asked for, see `is_contested`.
    """
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}, but it must be one of {', '.join(SPLITS)}. Use 'heldout' to measure.")
    random = Random(f"{split}-{seed}")
    return [_example(random, split == "heldout") for _ in range(count)]


def pieces_of(example: Example) -> dict[str, Any]:
    """Give an example as `BlendCache.inputs` takes it."""
    return {"prefix": example.prefix, "chunks": list(example.chunks), "question": example.question}


def _example(random: Random, heldout: bool) -> Example:
    kind = random.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    while True:
        story = tell(random, Level(), heldout)
        fitting = [one for one in examples_of(story) if one.kind == kind and is_contested(story, one.answer)]
        if fitting:
            return random.choice(fitting)


def is_contested(story: Story, answer: str) -> bool:
    """Tell whether two other people, or one other town, have such a thing; otherwise it could be guessed."""
    relations = {fact.value: fact.relation for fact in story.facts}
    same = list(relations.values()).count(relations[answer])
    return same >= (2 if relations[answer] in TOWN_RELATIONS else 3)
