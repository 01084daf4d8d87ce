# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Short documents about invented people, told in chunks that lean on each other.

A person is named once; later chunks say "she", "the captain" or "that town". How many chunks go on about a person,
and how many speak of nobody, varies, so that a reader cannot find out who is meant by counting chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .words import (
    CLOSERS,
    FILLERS,
    NAMES,
    PERSON_RELATIONS,
    PHRASES,
    PRONOUNS,
    TOWN_RELATIONS,
    VALUES,
    is_heldout,
    phrase_index,
    subject_index,
)


@dataclass(frozen=True)
class Level:
    """How hard a story is; shares are probabilities between 0 and 1."""

    people: tuple[int, int] = (4, 5)
    facts: tuple[int, int] = (3, 4)
    pronoun_share: float = 0.9
    role_share: float = 0.7
    town_share: float = 0.7
    filler_share: float = 0.1
    relations: tuple[str, ...] = PERSON_RELATIONS


@dataclass(frozen=True)
class Fact:
    """One thing that a story says, and how: `told_by` is explicit, pronoun, role or town."""

    subject: str
    relation: str
    value: str
    chunk: int
    told_by: str


@dataclass(frozen=True)
class Story:
    """The chunks of a document, each ending in a newline, and the facts that stand in them."""

    chunks: tuple[str, ...]
    facts: tuple[Fact, ...]


@dataclass
class _Person:
    name: str
    pronoun: str
    facts: list[tuple[str, str]]
    later: list[tuple[str, str]] = field(default_factory=list)

    @property
    def role(self) -> str:
        return dict(self.facts).get("role", "")


class _Teller:
    """Writes one story; keeps what has been said so far."""

    def __init__(self, random: Random, level: Level, heldout: bool) -> None:
        self.random = random
        self.level = level
        self.heldout = heldout
        self.chunks: list[str] = []
        self.facts: list[Fact] = []
        self.used: set[str] = set()
        self.about_towns = random.choice(TOWN_RELATIONS)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def value(self, subject: str, relation: str) -> str | None:
        """Draw a value of the right split that nobody else in this story has."""
        index = subject_index(subject)
        free = [
            value
            for position, value in enumerate(VALUES[relation])
            if value not in self.used and is_heldout(index, position) == self.heldout
        ]
        if not free:
            return None
        chosen = self.random.choice(free)
        self.used.add(chosen)
        return chosen

    def draw(self, subject: str, relations: list[str]) -> list[tuple[str, str]]:
        drawn = [(relation, self.value(subject, relation)) for relation in relations]
        return [(relation, value) for relation, value in drawn if value is not None]

    def person(self, name: str, pronoun: str) -> _Person:
        relations = self.random.sample(self.level.relations, self.random.randint(*self.level.facts))
        facts = self.draw(name, sorted(relations, key=lambda relation: relation != "role"))
        person = _Person(name, pronoun, facts)
        if person.role and len(facts) > 2 and self.chance(self.level.role_share):
            person.later = [facts.pop()]
        if self.chance(0.5) and not person.role:
            self.random.shuffle(facts)
        return person

    def sentence(self, subject: str, relation: str, value: str) -> str:
        """Say one fact, with a closing word; phrase and closing word make a pair of the split."""
        phrase = self.random.randrange(len(PHRASES[relation]))
        number = phrase_index(relation, phrase)
        closers = [word for i, word in enumerate(CLOSERS) if is_heldout(i, number) == self.heldout]
        closer = "" if "" in closers and self.chance(0.5) else self.random.choice(closers)
        text = PHRASES[relation][phrase].format(s=subject, v=value)
        return f"{text[0].upper()}{text[1:]} {closer}".rstrip() + "."

    def chunk(self, subjects: list[str], owner: str, told_by: str, facts: list[tuple[str, str]]) -> None:
        """Write one chunk: a sentence per fact, the i-th with the i-th way of naming its owner."""
        sentences = []
        for subject, (relation, value) in zip(subjects, facts, strict=True):
            sentences.append(self.sentence(subject, relation, value))
            self.facts.append(Fact(owner, relation, value, len(self.chunks), told_by))
        self.chunks.append(" ".join(sentences) + "\n")

    def filler(self) -> None:
        if self.chance(self.level.filler_share):
            self.chunks.append(self.random.choice(FILLERS) + "\n")

    def town(self, name: str) -> None:
        facts = self.draw(name, [self.about_towns])
        if facts and self.chance(self.level.pronoun_share):
            self.chunk(["that town"], name, "town", facts)
        elif facts:
            self.chunk([name], name, "explicit", facts)

    def block(self, person: _Person) -> None:
        """Name a person in one chunk and go on about the same person in none to three more."""
        facts = list(person.facts)
        first = True
        while facts:
            size = min(len(facts), 2 if self.chance(0.4) else 1)
            now, facts = facts[:size], facts[size:]
            named = first or not self.chance(self.level.pronoun_share)
            subjects = [person.name if named else person.pronoun] + [person.pronoun] * (size - 1)
            self.chunk(subjects, person.name, "explicit" if named else "pronoun", now)
            home = dict(now).get("home")
            if home and self.chance(self.level.town_share):
                self.town(home)
            self.filler()
            first = False

    def recall(self, told: list[_Person]) -> None:
        """Return to someone by role alone: "the captain"."""
        ready = [person for person in told if person.later]
        if ready and self.chance(0.6):
            person = self.random.choice(ready)
            self.chunk([f"the {person.role}"], person.name, "role", person.later)
            person.later = []

    def tell(self) -> Story:
        count = self.random.randint(*self.level.people)
        pairs = [(name, pronoun) for pronoun in PRONOUNS for name in NAMES[pronoun]]
        people = [self.person(*pair) for pair in self.random.sample(pairs, count)]
        for position, person in enumerate(people):
            self.block(person)
            self.recall(people[: position + 1])
        for _ in people:
            self.recall(people)
        return Story(tuple(self.chunks), tuple(self.facts))


def tell(random: Random, level: Level, heldout: bool) -> Story:
    """Write one story."""
    return _Teller(random, level, heldout).tell()
