# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of the chain world for evaluation: one per story, depths in turn."""

from dataclasses import dataclass
from random import Random

from hf_blend.errors import ConfigError

from .story import Level, Story, chain, question, tell

SPLITS = ("train", "heldout")
LONG = Level()


@dataclass(frozen=True)
class Example:
    """One prompt in pieces and its answer."""

    chunks: tuple[str, ...]
    question: str
    answer: str
    depth: int
    crossings: int
    links: tuple[tuple[int, ...], ...]
    chain: str


def sample_examples(count: int, seed: int, split: str = "heldout", level: Level = LONG) -> list[Example]:
    """Draw examples, one question per story; depths 0 to `level.depth` take turns."""
    if split not in SPLITS:
        raise ConfigError(f"split is {split!r}, expected one of {', '.join(SPLITS)}. Use 'heldout' to measure.")
    random = Random(f"{split}-{seed}")
    return [_example(random, number % (level.depth + 1), split, level) for number in range(count)]


def _example(random: Random, depth: int, split: str, level: Level) -> Example:
    while True:
        story = tell(random, level, split)
        fitting = [fact for fact in story.facts if fact.depth == depth and fact.is_held_out == (split == "heldout")]
        if fitting:
            fact = random.choice(fitting)
            asked, told = " ".join(question(fact.thing)), " ".join(chain(story, fact))
            return Example(texts(story), asked, fact.owner, fact.depth, fact.crossings, links(story), told)


def texts(story: Story) -> tuple[str, ...]:
    """The chunks of a story as text."""
    return tuple(" ".join(words[:-1]) + "\n" for words in story.chunks)


def links(story: Story) -> tuple[tuple[int, ...], ...]:
    """For each chunk the places of the tokens that refer back."""
    return tuple(
        tuple(fact.place for fact in story.facts if fact.chunk == index and fact.leans_on is not None)
        for index in range(len(story.chunks))
    )
