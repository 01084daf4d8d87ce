# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the `Realigner` alone: chunks moved to other positions, against the model and against themselves.

Most are properties of the mapping whatever the tables hold. That it puts keys where the model does is shown by
`moved_chunk` and `layer_0`, from forwards of the model at the new positions.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..model.capture import capture
from ..model.checks import FLOORS, CheckResult, States, check, violations
from ..model.placement import input_device
from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..store.chunk import ChunkKV
from .model_under_test import ModelUnderTest, distance, rounding, states_apart

CHUNK_TOKENS = 24
NEAR, FAR = 41, 130  # positions in the prompt; neither is a multiple of the other


@check()
def realign_identity(subject: ModelUnderTest) -> CheckResult:
    """A chunk that is moved by 0 keeps every bit: where old and new tables are equal the rotation is exactly 1."""
    chunk = _probe_chunk(subject)
    return CheckResult(_keys_apart(subject, _moved(subject, chunk, _home(subject)), chunk), 0.0)


@check()
def realign_back(subject: ModelUnderTest) -> CheckResult:
    """A chunk that is moved away and back is as it was, up to the rounding of two moves."""
    chunk = _probe_chunk(subject)
    back = _moved(subject, _moved(subject, chunk, FAR), _home(subject))
    return CheckResult(_keys_apart(subject, back, chunk), rounding(subject.dtype, 0, moves=2))


@check()
def realign_sum(subject: ModelUnderTest) -> CheckResult:
    """Moving a chunk by a and then by b is moving it by a + b, up to the rounding of three moves."""
    chunk = _probe_chunk(subject)
    twice = _moved(subject, _moved(subject, chunk, NEAR), FAR)
    error = _keys_apart(subject, twice, _moved(subject, chunk, FAR))
    return CheckResult(error, rounding(subject.dtype, 0, moves=3))


@check()
def realign_norm(subject: ModelUnderTest) -> CheckResult:
    """Moving a chunk keeps the length of every key, up to what the model's own tables do to it.

    A table rounded to bfloat16 is not quite on the circle; by how much is read off the tables.
    """
    chunk = _probe_chunk(subject)
    far = _moved(subject, chunk, FAR)
    shares = [
        float((_lengths(keys) - _lengths(before)).abs().amax() / _lengths(before).amax())
        for keys, before in zip(_rotated(subject, far), _rotated(subject, chunk), strict=True)
    ]
    return CheckResult(max(shares), rounding(subject.dtype, 0, moves=1) + _unevenness(chunk, far))


@check()
def realign_values(subject: ModelUnderTest) -> CheckResult:
    """Moving a chunk leaves every bit of its values; where attention is latent, of what is cached as the keys."""
    chunk = _probe_chunk(subject)
    pairs = zip(_unrotated(subject, _moved(subject, chunk, FAR)), _unrotated(subject, chunk), strict=True)
    return violations([f"layer {index}" for index, (new, old) in enumerate(pairs) if not torch.equal(new, old)])


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


def _rotated(subject: ModelUnderTest, chunk: ChunkKV) -> list[Tensor]:
    """Of each layer's (K, V) the tensor that rotates with the position, `[kv_heads, tokens, head_dim]`."""
    pairs = zip(chunk.layers, subject.styles, strict=True)
    return [layer[style.slot] for layer, style in pairs if len(layer) > 1]


def _unrotated(subject: ModelUnderTest, chunk: ChunkKV) -> list[Tensor]:
    """Of each layer's (K, V) the tensor that carries no position."""
    pairs = zip(chunk.layers, subject.styles, strict=True)
    return [layer[1 - style.slot] for layer, style in pairs if len(layer) > 1]


def _keys_apart(subject: ModelUnderTest, moved: ChunkKV, other: ChunkKV) -> float:
    """Largest difference of two chunks' keys, as a share of each layer's largest key; NaN counts as infinite."""
    pairs = zip(_rotated(subject, moved), _rotated(subject, other), strict=True)
    return max(distance(a, b) / float(b.float().abs().amax()) for a, b in pairs)


def _lengths(keys: Tensor) -> Tensor:
    return torch.linalg.vector_norm(keys.double(), dim=-1)


def _unevenness(moved: ChunkKV, other: ChunkKV) -> float:
    """How far the tables stretch at one position against another."""
    pairs = zip(moved.tables, other.tables, strict=True)
    radii = [[(cos.double() ** 2 + sin.double() ** 2).sqrt() for cos, sin in pair] for pair in pairs]
    return max((float((b / a - 1).abs().amax()) for a, b in radii), default=0.0)
