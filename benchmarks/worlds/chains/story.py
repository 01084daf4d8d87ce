# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stories of the chain world: facts about owners, most of which lean on an earlier fact about some kind of thing.

    the goat belongs to Mara .
    the lantern goes with that animal .
    whose is the lantern ?    -> Mara

A story tells of at most one thing of each kind, so "that animal" is clear, but it mostly is in another chunk. The
owner of the lantern is the owner of that animal, which may have been linked itself: up to `Level.depth` links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from .words import (
    ADJECTIVES,
    ENDS,
    FILLERS,
    KIND_OF,
    LINKED,
    NOUNS,
    OWNED,
    OWNERS,
    THINGS,
    UNSEEN_ADJECTIVES,
    UNSEEN_NOUNS,
    held_out,
)

_DEEPER = 1.5  # how much likelier a thing is leant on for each link behind it, so that depths come out about even


@dataclass(frozen=True)
class Level:
    """How long and how deep stories are."""

    chunks: tuple[int, int] = (10, 16)
    facts: tuple[int, int] = (1, 2)
    fillers: tuple[int, int] = (10, 20)
    depth: int = 4
    rooted: float = 0.2


@dataclass(frozen=True)
class Fact:
    """One sentence about an owner."""

    thing: str
    owner: str
    leans_on: str | None
    verb: str
    depth: int
    crossings: int
    chunk: int
    place: int

    @property
    def is_held_out(self) -> bool:
        """Whether training never sees this fact."""
        return held_out(self.thing, self.owner, self.leans_on or self.verb)


@dataclass
class Story:
    """Words of every chunk, and the facts in their order."""

    chunks: list[list[str]] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)


class Teller:
    """Draws one story."""

    def __init__(self, random: Random, level: Level, split: str) -> None:
        """Prepare."""
        self.random, self.level, self.train = random, level, split == "train"
        self.owners = random.sample(OWNERS, len(OWNERS))
        self.kinds = random.sample(list(THINGS), len(THINGS))  # not told of yet
        self.story = Story()

    def tell(self) -> Story:
        """Write chunk after chunk."""
        for index in range(self.random.randint(*self.level.chunks)):
            words: list[str] = []
            self.story.chunks.append(words)
            parts = [True] * self.random.randint(*self.level.facts)
            parts += [False] * self.random.randint(*self.level.fillers)
            self.random.shuffle(parts)
            for is_fact in parts:
                words += self.fact(index, len(words)) if is_fact else self.filler()
            words.append("\n")
        return self.story

    def fact(self, chunk: int, start: int) -> list[str]:
        """One sentence with its fact; nothing if every kind has been told of."""
        if not self.kinds:
            return []
        parents = [fact for fact in self.story.facts if fact.depth < self.level.depth]
        roots = sum(fact.depth == 0 for fact in self.story.facts)
        if not parents or roots < 2 or self.random.random() < self.level.rooted:
            return self.root(chunk, start)
        parent = self.random.choices(parents, [_DEEPER**fact.depth for fact in parents])[0]
        verb, thing = self.random.choice(LINKED), self.draw(parent.owner, parent.thing)
        words = ["the", thing, *verb.split(), "that", KIND_OF[parent.thing], "."]
        crossings, place = parent.crossings + (parent.chunk != chunk), start + len(words) - 2
        fact = Fact(thing, parent.owner, parent.thing, verb, parent.depth + 1, crossings, chunk, place)
        self.story.facts.append(fact)
        return words

    def root(self, chunk: int, start: int) -> list[str]:
        """A sentence that names an owner of whom nothing was said before."""
        owner, verb = self.owners.pop(), self.random.choice(OWNED)
        thing = self.draw(owner, verb)
        words = ["the", thing, *verb.split(), owner, "."]
        self.story.facts.append(Fact(thing, owner, None, verb, 0, 0, chunk, start + len(words) - 2))
        return words

    def draw(self, owner: str, through: str) -> str:
        """A thing of a kind that has not been told of; in training one that may be this owner's."""
        while True:
            words = THINGS[self.kinds.pop()]
            free = [word for word in words if not (self.train and held_out(word, owner, through))]
            if free:
                return self.random.choice(free)
            self.kinds.insert(0, KIND_OF[words[0]])

    def filler(self) -> list[str]:
        """A sentence that says nothing of owners."""
        nouns: Sequence[str] = NOUNS if self.train else NOUNS + UNSEEN_NOUNS
        adjectives: Sequence[str] = ADJECTIVES if self.train else ADJECTIVES + UNSEEN_ADJECTIVES
        one, other = self.random.sample(adjectives, 2)
        text = self.random.choice(FILLERS)
        return text.format(n=self.random.choice(nouns), a=one, b=other, e=self.random.choice(ENDS)).split()


def tell(random: Random, level: Level, split: str = "train") -> Story:
    """Draw one story; see `Teller`."""
    return Teller(random, level, split).tell()


def question(thing: str) -> list[str]:
    """The words of the question whose a thing is."""
    return ["whose", "is", "the", thing, "?"]


def chain(story: Story, fact: Fact) -> list[str]:
    """The words of the sentences that lead from a thing to its owner, as the story has them, in turn."""
    by_thing, words = {one.thing: one for one in story.facts}, []
    while True:
        end = ["that", KIND_OF[fact.leans_on]] if fact.leans_on else [fact.owner]
        words += ["the", fact.thing, *fact.verb.split(), *end, "."]
        if fact.leans_on is None:
            return words
        fact = by_thing[fact.leans_on]
