# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is known of stored tokens before anything is computed: a host table for the selector, made from the plan."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..store.chunk import ChunkKey
from .plan import PlacedChunk, Plan

LEAST_SHARED = 0.5  # tokens that a chunk counts as sharing with the question when it shares none


def token_weights(plan: Plan, importance: bool = True, words: bool = True) -> np.ndarray:
    """How much each token matters, as far as it is known: `[batch, tokens]` float32, 1 where nothing is known.

    Args:
        plan: of the forward.
        importance: multiply by the stored importance of the token, 1 on average over a prompt's chunks that have it.
        words: multiply by the tokens that the question shares with the chunk, 1 on average over a prompt's chunks.
    """
    weights = np.ones(tuple(plan.real.shape), np.float32)
    for row, question in enumerate(plan.questions):
        chunks = [placed for placed in plan.chunks if placed.row == row and not placed.exact]
        if importance:
            multiply_by_importance(weights[row], chunks)
        if words:
            shared = shared_rarity([placed.chunk.key for placed in chunks], question)
            for placed in chunks:
                weights[row, placed.columns] *= shared[placed.chunk.key]
    return weights


def multiply_by_importance(weights: np.ndarray, chunks: Sequence[PlacedChunk]) -> None:
    """Multiply the weights of one prompt's tokens, `[tokens]`, by their importance over its mean.

    Numbers are compared if they are of one question: that of most of the chunks.
    """
    questions = Counter(placed.chunk.question for placed in chunks if placed.chunk.importance is not None)
    if not questions:
        return
    question = questions.most_common(1)[0][0]
    found = []
    for placed in chunks:
        if placed.chunk.importance is not None and placed.chunk.question == question:
            numbers = placed.chunk.importance.numpy()[placed.inside].astype(np.float32)
            found.append((placed.columns, numbers))
    mean = float(np.concatenate([numbers for _, numbers in found]).mean())
    for columns, numbers in found:
        if mean > 0:
            weights[columns] *= numbers / mean


def shared_rarity(keys: Sequence[ChunkKey], question: Sequence[int]) -> dict[ChunkKey, float]:
    """For each chunk the sum over rare ids shared with the question of 1 / (chunks that have the id), 1 on average.

    An id is rare that at most half of the chunks have: the others say nothing of which chunk is asked for.
    """
    asked = set(question)
    shared = {key: asked.intersection(key.token_ids) for key in dict.fromkeys(keys)}
    chunks_with = Counter(token for found in shared.values() for token in found)
    sums = {}
    for key, found in shared.items():
        rare = sorted(token for token in found if 2 * chunks_with[token] <= len(shared))
        sums[key] = LEAST_SHARED + sum(1 / chunks_with[token] for token in rare)
    mean = sum(sums.values()) / max(1, len(sums))
    return {key: total / mean for key, total in sums.items()}
