# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Held-out accuracy during training, with full attention and as if every chunk's KV had been reused."""

from __future__ import annotations

from collections import defaultdict
from random import Random

import torch
from transformers import LlamaForCausalLM

from .batches import Row, attention_mask, collate, repeat_row, story_row
from .story import Level
from .tokens import EOS, vocabulary


@torch.no_grad()
def score(model: LlamaForCausalLM, rows: list[Row], length: int, reuse: bool) -> dict[str, float]:
    """Return the share of exactly right answers (the word, then the end) by kind of question, and over all.

    Args:
        model: the model; its mode is left as it is.
        rows: packed stories with their questions.
        length: tokens to pad to.
        reuse: let chunks see only themselves and BOS, see `attention_mask`.
    """
    batch = collate(rows, length)
    output = model(batch.ids, attention_mask=attention_mask(batch, reuse), position_ids=batch.positions)
    best = output.logits.argmax(-1)
    right = defaultdict(list)
    for index, row in enumerate(rows):
        for place, question in row.asked:
            answer, end = best[index, place : place + 2].tolist()
            correct = answer == vocabulary()[question.answer] and end == vocabulary()[EOS]
            right[question.kind].append(correct)
            right["all"].append(correct)
    return {kind: sum(found) / len(found) for kind, found in sorted(right.items())}


def heldout_scores(model: LlamaForCausalLM, level: Level, length: int, count: int) -> dict[str, dict[str, float]]:
    """Score `count` held-out stories with full prefill and with full reuse."""
    random = Random("scores")
    rows = [story_row(random, level, length, True) for _ in range(count)]
    return {"full": score(model, rows, length, False), "reuse": score(model, rows, length, True)}


@torch.no_grad()
def copying_score(model: LlamaForCausalLM, length: int) -> float:
    """Return the share of right guesses in the repeats of random words."""
    random = Random("copying")
    batch = collate([repeat_row(random, length) for _ in range(4)], length)
    output = model(batch.ids, attention_mask=attention_mask(batch), position_ids=batch.positions)
    counted = batch.weights > 0
    return (output.logits.argmax(-1) == batch.labels)[counted].float().mean().item()
