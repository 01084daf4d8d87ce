# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Held-out accuracy during training, with full attention and as if every chunk's KV had been reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random

import torch
from transformers import LlamaForCausalLM
from world_batches import Row, attention_mask, collate, pack, story_row
from worlds.world.sampling import Example, Question
from worlds.world.story import Level, Story
from worlds.world.tokens import EOS, vocabulary

_ROWS_AT_ONCE = 32
_LONGEST = 1024


def score(model: LlamaForCausalLM, rows: list[Row], length: int, reuse: bool) -> dict[str, float]:
    """Return the share of exactly right answers (the word, then the end) by kind of question, and over all.

    Args:
        model: the model; its mode is left as it is.
        rows: packed stories with their questions.
        length: tokens to pad to.
        reuse: let chunks see only themselves and BOS, see `attention_mask`.
    """
    right = defaultdict(list)
    for kind, correct in _judge(model, rows, length, reuse):
        right[kind].append(correct)
        right["all"].append(correct)
    return {kind: sum(found) / len(found) for kind, found in sorted(right.items())}


@torch.no_grad()
def _judge(model: LlamaForCausalLM, rows: list[Row], length: int, reuse: bool) -> Iterator[tuple[str, bool]]:
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        batch = collate(some, length)
        output = model(batch.ids, attention_mask=attention_mask(batch, reuse), position_ids=batch.positions)
        best = output.logits.argmax(-1)
        for index, row in enumerate(some):
            for place, question in row.asked:
                answer, end = best[index, place : place + 2].tolist()
                yield question.kind, answer == vocabulary()[question.answer] and end == vocabulary()[EOS]


def score_examples(model: LlamaForCausalLM, examples: list[Example]) -> dict[str, dict[str, float]]:
    """Score examples, each alone in its prompt, with full prefill ("full") and with full reuse ("reuse")."""
    rows = [
        pack(Story(one.chunks, ()), [Question(one.question, one.answer, one.hops, one.kind)], _LONGEST, 0.0)
        for one in examples
    ]
    length = max(len(row.ids) for row in rows)
    return {"full": score(model, rows, length, False), "reuse": score(model, rows, length, True)}


def heldout_scores(model: LlamaForCausalLM, level: Level, length: int, count: int) -> dict[str, dict[str, float]]:
    """Score `count` held-out stories with full prefill and with full reuse."""
    random = Random("scores")
    rows = [story_row(random, level, length, True) for _ in range(count)]
    return {"full": score(model, rows, length, False), "reuse": score(model, rows, length, True)}
