# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the `Realigner` alone: chunks moved to other positions, against the model and against themselves.

A chunk that is moved by 0 and the values of one that is moved keep every bit. That keys are put where the model puts
them is shown by forwards of the model at the new positions.
"""

from dataclasses import replace

import torch

from ..model.capture import capture
from ..model.checks import FLOORS, CheckResult, States, check, violations
from ..model.placement import input_device
from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..store.chunk import ChunkKV
from .model_under_test import ModelUnderTest, distance, rounding, states_apart

CHUNK_TOKENS = 24
FAR = 130  # a position in the prompt


@check()
def realign_identity(subject: ModelUnderTest) -> CheckResult:
    """A chunk that is moved by 0 keeps every bit: where old and new tables are equal the rotation is exactly 1."""
    chunk = _probe_chunk(subject)
    return CheckResult(states_apart(_moved(subject, chunk, _home(subject)).layers, chunk.layers), 0.0)


@check()
def realign_values(subject: ModelUnderTest) -> CheckResult:
    """Moving a chunk leaves every bit of its values; where attention is latent, of what is cached as the keys."""
    chunk = _probe_chunk(subject)
    layers = enumerate(zip(_moved(subject, chunk, FAR).layers, chunk.layers, subject.styles, strict=True))
    unrotated = [(index, new, old, 1 - style.slot) for index, (new, old, style) in layers if len(old) > 1]
    return violations(
        [f"layer {index}" for index, new, old, slot in unrotated if not torch.equal(new[slot], old[slot])]
    )


@check()
def moved_chunk(subject: ModelUnderTest) -> CheckResult:
    """A moved chunk has, at every layer, the K and V that the model computes for it alone at its new position.

    Behind the same prefix, everything shifted: by the composed rotation of each layer, with each layer's own table.
    """
    ids = (*subject.chunk_prefix_ids, *subject.ids(CHUNK_TOKENS, seed=7))
    positions = torch.arange(len(ids), device=input_device(subject.model)) + FAR - _home(subject)
    layers = capture(subject.model, torch.tensor([ids]), positions[None]).layers
    there = [tuple(states[0, :, _home(subject) :] for states in layer) for layer in layers]
    got = _moved(subject, _probe_chunk(subject), FAR).layers
    largest = max(float(states.abs().amax()) for layer in there for states in layer)
    allowed = FLOORS * subject.floor.states + largest * rounding(subject.dtype, 6, moves=1)
    return CheckResult(states_apart(got, there), allowed)


@check()
def layer_0(subject: ModelUnderTest) -> CheckResult:
    """At layer 0 a realigned chunk has the K and V of a full prefill, because they do not depend on the context.

    A key is rounded three times where it is computed, there and here, and once more where it is moved.
    """
    prompt = subject.prompts[0]
    expected = _layer_0_of(subject)
    realigner = Realigner(subject.styles, BlendReport())
    realigner.tables[0] = subject.prompt_tables([prompt])[0]
    errors = [0.0]
    for number, (start, ids, *_) in enumerate(prompt.spans()):
        placed = PlacedChunk(0, start, subject.chunk(ids), False, number)
        fresh = tuple(states[:, placed.columns] for states in expected)
        of_mixer = subject.mixers[0] is not None
        moved = placed.chunk.layers[0][-1:] if of_mixer else realigner.moved(0, placed, *fresh) if fresh else ()
        errors += [distance(*pair) for pair in zip(moved, fresh, strict=True)]
    largest = max((float(states.abs().amax()) for states in expected), default=0.0)
    return CheckResult(max(errors), subject.floor.layer_0 + largest * rounding(subject.dtype, 6, moves=1))


def _layer_0_of(subject: ModelUnderTest) -> States:
    """What layer 0 keeps in a full prefill; the projections of its mixer where it keeps no K and V."""
    prompt = subject.prompts[0]
    plain = subject.plain([prompt])[0].layers[0]
    if plain and subject.mixers[0] is None:
        return plain
    layer = capture(subject.model, torch.tensor([prompt.ids])).layers[0]
    return tuple(states[0] for states in layer[-1:])


def _probe_chunk(subject: ModelUnderTest) -> ChunkKV:
    return subject.chunk(subject.ids(CHUNK_TOKENS, seed=7))


def _home(subject: ModelUnderTest) -> int:
    """The first position of a probe chunk as it is stored."""
    return len(subject.chunk_prefix_ids)


def _moved(subject: ModelUnderTest, chunk: ChunkKV, start: int) -> ChunkKV:
    """Realign a chunk as a request does."""
    realigner, placed = Realigner(subject.styles, BlendReport()), PlacedChunk(0, 0, chunk, False, 0)
    tables, layers = list(chunk.tables), []
    for index, table in enumerate(subject.tables_at(start, chunk.tokens)):
        realigner.tables[index] = table
        into = [torch.full_like(states, float("nan"))[None] for states in chunk.layers[index]]
        if len(into) > 1:
            realigner.write(index, [placed], *into[:2])
        if len(into) % 2:
            realigner.write_beside(index, [placed], into[-1])
        layers.append(tuple(states[0] for states in into))
        if table is not None and chunk.layer_table[index] >= 0:
            tables[chunk.layer_table[index]] = tuple(tensor[0].float() for tensor in table)
    return replace(chunk, layers=tuple(layers), tables=tuple(tables))
