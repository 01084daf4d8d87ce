# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Rows for training: one story, many questions about it, and what must be predicted where."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from worlds.chains.story import Fact, Level, Story, question, tell
from worlds.chains.tokens import BOS, EOS, vocabulary

ASKED = 6  # tokens of a question with its answer
_HIDDEN = float("-inf")


@dataclass(frozen=True)
class Batch:
    """Tensors of some rows; a row is a story padded to `story` tokens, then the questions.

    Attributes:
        ids: `[rows, story + questions]`.
        positions: of the prompt in which each question would stand alone.
        story: tokens of the story's part.
        late: added to the scores of the questions, which see the story and themselves, `[rows, 1, questions, all]`.
        early: likewise, where they see BOS and themselves.
        chunks: index of the chunk of each token of the story, from 1; 0 is BOS, -1 padding.
        asked: row, place of the question mark, id of the owner, place where the fact is closed, of every question.
        facts: the fact behind each question.
        links: row, place, id of the owner, id of the thing leant on (or the owner), depth, and the places where that
            thing is named and where its fact is closed (or the fact's own), of every fact.
    """

    ids: Tensor
    positions: Tensor
    story: int
    late: Tensor
    early: Tensor
    chunks: Tensor
    asked: Tensor
    facts: list[Fact]
    links: Tensor


def draw(random: Random, level: Level, rows: int, story: int, questions: int, split: str = "train") -> Batch:
    """Draw rows.

    Args:
        random: decides everything.
        level: of the stories.
        rows: how many.
        story: tokens of a story with BOS; longer stories are drawn again.
        questions: how many of a story's facts are asked for, at most.
        split: as `tell` takes it; "heldout" asks for held-out facts only.

    Returns:
        The batch.
    """
    ids_of = vocabulary()
    ids = torch.full((rows, story + questions * ASKED), ids_of[EOS])
    positions = torch.zeros_like(ids)
    chunks = torch.full((rows, story), -1)
    asked, facts, links, lengths = [], [], [], []
    for row in range(rows):
        told = fitting(random, level, story, split)
        words, places, starts = [BOS], [0], []
        for index, chunk in enumerate(told.chunks, start=1):
            starts.append(len(words))
            words += chunk
            places += [index] * len(chunk)
        length = len(words)
        lengths.append(length)
        ids[row, :length] = torch.tensor([ids_of[word] for word in words])
        positions[row, :length] = torch.arange(length)
        chunks[row, :length] = torch.tensor(places)
        closed = {fact.thing: starts[fact.chunk] + fact.place for fact in told.facts}
        for fact in told.facts:
            leant, place = ids_of[fact.leans_on or fact.owner], closed[fact.thing]
            named = words.index(fact.leans_on) if fact.leans_on else place
            links.append(
                (row, place, ids_of[fact.owner], leant, fact.depth, named, closed[fact.leans_on or fact.thing])
            )
        for number, fact in enumerate(chosen(random, told, questions, split)):
            first = story + number * ASKED
            text = [*question(fact.thing), fact.owner]
            ids[row, first : first + ASKED] = torch.tensor([ids_of[word] for word in text])
            positions[row, first : first + ASKED] = torch.arange(length, length + ASKED)
            asked.append((row, first + ASKED - 2, ids_of[fact.owner], closed[fact.thing]))
            facts.append(fact)
    late, early = _masks(torch.tensor(lengths), story, questions)
    return Batch(ids, positions, story, late, early, chunks, torch.tensor(asked), facts, torch.tensor(links))


def fitting(random: Random, level: Level, story: int, split: str) -> Story:
    """Draw a story of at most `story` tokens with BOS."""
    while True:
        told = tell(random, level, split)
        if 1 + sum(map(len, told.chunks)) <= story:
            return told


def chosen(random: Random, story: Story, count: int, split: str) -> list[Fact]:
    """Facts to ask for, every depth alike as far as there are enough."""
    by_depth: dict[int, list[Fact]] = {}
    for fact in random.sample(story.facts, len(story.facts)):
        if split == "train" or fact.is_held_out:
            by_depth.setdefault(fact.depth, []).append(fact)
    found = []
    while len(found) < count and any(by_depth.values()):
        found.append(random.choice([facts for facts in by_depth.values() if facts]).pop())
    return found


def _masks(lengths: Tensor, story: int, questions: int) -> tuple[Tensor, Tensor]:
    owner = torch.arange(questions * ASKED) // ASKED
    own = (owner[:, None] == owner[None]).tril()[None].expand(len(lengths), -1, -1)
    told = (torch.arange(story) < lengths[:, None])[:, None].expand(-1, questions * ASKED, -1)
    first = (torch.arange(story) == 0).expand_as(told)
    masks = [torch.cat((seen, own), 2)[:, None] for seen in (told, first)]
    late, early = (torch.zeros(mask.shape).masked_fill(~mask, _HIDDEN) for mask in masks)
    return late, early


def reuse_mask(batch: Batch) -> Tensor:
    """Added to the scores of the story when each chunk sees only BOS and itself, `[rows, 1, story, story]`."""
    one, other = batch.chunks[:, :, None], batch.chunks[:, None]
    seen = ((one == other) | (other == 0)).tril()[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, _HIDDEN)
