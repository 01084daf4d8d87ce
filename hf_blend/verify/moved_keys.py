# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A check of moved chunks, against forwards of the model at the new positions."""

import torch

from ..model.anatomy import input_device
from ..model.capture import capture
from ..model.checks import FLOORS, CheckResult, States, check, violations
from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..store.chunk import ChunkKV
from .model_under_test import ModelUnderTest, rounding, states_apart

CHUNK_TOKENS = 24
FAR = 130  # a position in the prompt


@check()
def moved_chunk(subject: ModelUnderTest) -> CheckResult:
    """A moved chunk has, at every layer, the K and V that the model computes for it alone at its new position.

    Behind the same prefix, everything shifted: by the composed rotation of each layer, with each layer's own table. A
    chunk that is moved by 0 keeps every bit, and so do the values of one that is moved.
    """
    prefix_tokens = len(subject.chunk_prefix_ids)
    chunk = subject.chunk(subject.ids(CHUNK_TOKENS, seed=7))
    if states_apart(_moved(subject, chunk, prefix_tokens), chunk.layers):
        return violations(["a chunk that is moved by 0 has other bits"])
    got = _moved(subject, chunk, FAR)
    for index, style in enumerate(subject.styles):
        stored = chunk.layers[index]
        values = 1 - style.slot
        if len(stored) > 1 and not torch.equal(got[index][values], stored[values]):
            return violations([f"the values of layer {index}, which nothing rotates, have other bits"])
    # The same tokens, run at the new position
    ids = (*subject.chunk_prefix_ids, *subject.ids(CHUNK_TOKENS, seed=7))
    first = FAR - prefix_tokens
    positions = torch.arange(first, first + len(ids), device=input_device(subject.model))
    captured = capture(subject.model, torch.tensor([ids]), positions[None])
    there = []
    largest = 0.0
    for layer in captured.layers:
        expected = tuple(states[0, :, prefix_tokens:] for states in layer)
        there.append(expected)
        largest = max(largest, *(float(states.abs().amax()) for states in expected), 0.0)
    allowed = FLOORS * subject.floor.states + largest * rounding(subject.model.dtype, 6, moves=1)
    return CheckResult(states_apart(got, there), allowed)


def _moved(subject: ModelUnderTest, chunk: ChunkKV, start: int) -> list[States]:
    """What every layer keeps of a chunk that is realigned as a request does it, `[…, tokens, width]`."""
    realigner = Realigner(subject.styles, BlendReport())
    placed = PlacedChunk(0, 0, chunk, False, 0)
    layers = []
    for index, table in enumerate(subject.tables_at(start, chunk.tokens)):
        realigner.tables[index] = table
        into = [torch.full_like(states, float("nan"))[None] for states in chunk.layers[index]]
        if len(into) > 1:
            realigner.write(index, [placed], *into[:2])
        if len(into) % 2:
            realigner.write_beside(index, [placed], into[-1])
        layers.append(tuple(states[0] for states in into))
    return layers
