# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Training batches: a story and many questions about it in one sequence.

Each question sees the story and itself but no other question, and its positions go on from the story's end, so a
sequence holds many independent prompts at the price of one story.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from worlds.world.sampling import Question, questions
from worlds.world.story import Level, Story, tell
from worlds.world.tokens import BOS, EOS, encode, vocabulary

NO_LABEL = -100
_EAGERNESS = {"explicit": 1, "pronoun": 2, "two-hop": 2, "role": 4, "town": 4}  # the rare kinds are asked first


@dataclass(frozen=True)
class Row:
    """One packed sequence; all lists have the same length, in tokens.

    `chunk` is 0 for BOS, 1, 2 … for the chunks and -1 elsewhere; `question` is 0 for the story and 1, 2 … for the
    questions. `weights` holds the share of each token's prediction in the loss. `asked` lists for each question where
    the prediction of its answer stands.
    """

    ids: list[int]
    positions: list[int]
    chunk: list[int]
    question: list[int]
    weights: list[float]
    asked: list[tuple[int, Question]]


@dataclass(frozen=True)
class Batch:
    """Rows as tensors `[batch, tokens]`, padded at the end; `labels` are already shifted to the predicting token."""

    ids: torch.Tensor
    positions: torch.Tensor
    chunk: torch.Tensor
    question: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def pack(story: Story, asked: list[Question], length: int, story_weight: float) -> Row:
    """Put a story and as many of the questions as fit into one row of at most `length` tokens."""
    row = Row([vocabulary()[BOS]], [0], [0], [0], [0.0], [])
    for number, chunk in enumerate(story.chunks, start=1):
        _append(row, encode(chunk), number, 0, story_weight)
    start = len(row.ids)
    for number, question in enumerate(asked, start=1):
        text = encode(question.text)
        if len(row.ids) + len(text) + 2 > length:
            break
        _append(row, text, -1, number, 0.0, start)
        row.asked.append((len(row.ids) - 1, question))
        _append(row, [vocabulary()[question.answer], vocabulary()[EOS]], -1, number, 1.0, start + len(text))
        row.weights[-1] = 0.2
    return row


def _append(row: Row, ids: list[int], chunk: int, question: int, weight: float, start: int | None = None) -> None:
    first = len(row.ids) if start is None else start
    row.ids.extend(ids)
    row.positions.extend(range(first, first + len(ids)))
    row.chunk.extend([chunk] * len(ids))
    row.question.extend([question] * len(ids))
    row.weights.extend([weight] * len(ids))


def story_row(random: Random, level: Level, length: int, heldout: bool, story_weight: float = 0.02) -> Row:
    """Draw a story that fits and pack it with its questions in random order, rare kinds more often first."""
    while True:
        story = tell(random, level, heldout)
        asked = questions(story)
        asked.sort(key=lambda one: random.random() ** (1 / _EAGERNESS[one.kind]), reverse=True)
        row = pack(story, asked, length, story_weight)
        if row.asked:
            return row


def collate(rows: list[Row], length: int) -> Batch:
    """Pad rows to `length` tokens and shift labels and weights so that a token predicts the next of its own block."""
    size = (len(rows), length)
    ids = torch.full(size, vocabulary()[EOS])
    positions, chunk = torch.zeros(size, dtype=torch.long), torch.full(size, -1)
    question, labels = torch.full(size, -1), torch.full(size, NO_LABEL)
    weights = torch.zeros(size)
    for index, row in enumerate(rows):
        count = len(row.ids)
        for target, values in ((ids, row.ids), (positions, row.positions), (chunk, row.chunk)):
            target[index, :count] = torch.tensor(values)
        question[index, :count] = torch.tensor(row.question)
        weights[index, : count - 1] = torch.tensor(row.weights[1:])
    labels[:, :-1] = ids[:, 1:]
    weights[:, :-1] *= question[:, :-1] == question[:, 1:]
    return Batch(ids, positions, chunk, question, labels, weights)


def attention_mask(batch: Batch, reuse: bool = False) -> torch.Tensor:
    """Return who may look at whom, `[batch, 1, queries, keys]`, true where allowed.

    Args:
        batch: the packed rows.
        reuse: emulate full KV reuse: chunk tokens see BOS and their own chunk only, at their place in the prompt;
            questions see everything. With rotary positions this equals storing chunks alone and realigning them.
    """
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = batch.question[:, :, None], batch.question[:, None, :]
    allowed = causal & ((key == 0) | (key == query))
    if reuse:
        query, key = batch.chunk[:, :, None], batch.chunk[:, None, :]
        allowed &= (query < 1) | (key < 1) | (query == key)
    return allowed[:, None]
