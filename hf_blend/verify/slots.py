# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns of a blended request came from the store and stayed as they were."""

import torch
from torch import Tensor

from ..prefill.plan import PlacedChunk
from .subject import Blended, ModelUnderTest


def reusable(got: Blended) -> Tensor:
    """`[batch, tokens]`: the columns of the chunks, which may be chosen."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    grid = torch.zeros((len(got.prompts), width), dtype=torch.bool)
    for row, prompt in enumerate(got.prompts):
        start = width - len(prompt.ids)
        grid[row, start + len(prompt.prefix) : width - len(prompt.question)] = True
    return grid


def unchosen(got: Blended) -> Tensor:
    """`[batch, tokens]`: the columns of the chunks that were not chosen."""
    grid = reusable(got)
    for row, columns in enumerate(got.cache.report.chosen_columns):
        grid[row, columns] = False
    return grid


def chunk_slots(subject: ModelUnderTest, got: Blended) -> list[PlacedChunk]:
    """Every chunk of the request at its place, computed again, together with those that it was computed with."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    ids_of = dict.fromkeys(ids for prompt in got.prompts for _, ids, *_ in prompt.spans())
    chunks = dict(zip(ids_of, subject.chunks(list(ids_of)), strict=True))
    return [
        PlacedChunk(row, width - len(prompt.ids) + start, chunks[ids], False, number)
        for row, prompt in enumerate(got.prompts)
        for number, (start, ids, *_) in enumerate(prompt.spans())
    ]
