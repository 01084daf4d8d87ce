# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A few numbers of what a model computes, by which a chunk of another model is refused.

A fingerprint is made of what can be read: weights, attributes, code. What cannot be read (another release of a
library, state inside a compiled extension, an edited file of offloaded weights) shows in what the model computes. So a
canary travels with every stored chunk: projections of the K and V that the last layer keeps of eight fixed tokens. It
is compared with the model's own before the chunk is used.
"""

import base64
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .anatomy import text_config
from .capture import capture, capture_chunks
from .checks import token_errors
from .fingerprint import fingerprint, state_of

if TYPE_CHECKING:
    from ..store.chunk import ChunkKey, ChunkKV

TOKENS = 8
NUMBERS = 8  # of each token: four of its keys and four of its values, each a sum with random signs
TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}  # relative; devices and attention functions differ by 1e-5
COARSE_TOLERANCE = 0.15  # bfloat16 and float16, and models whose matrix products are quantised

_known: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()


def compute_chunks(model: nn.Module, keys: "Iterable[ChunkKey]", tokenizer: str = "") -> "Iterator[ChunkKV]":
    """Compute chunks one after the other, to be stored with the model's canary.

    Raises:
        UnsupportedModelError: the model changed after the chunks' keys were made.
    """
    for chunk in capture_chunks(model, keys):
        now = fingerprint(model)
        expected = chunk.key.fingerprint
        if expected != now:
            raise UnsupportedModelError(
                f"{type(model).__name__} changed while a chunk was computed: its fingerprint is {now:.12}…, expected "
                f"{expected:.12}…. Nothing is stored. Do not train or patch a model while it is used."
            )
        yield replace(chunk, canary=canary_of(model), tokenizer=tokenizer)


def canary_of(model: nn.Module) -> str:
    """The canary of a model as it is now: base64 of 64 float32, found by one short forward after each change."""
    record, state = _known.get(model), state_of(model)
    if record is None or record[0] != state:
        record = _known[model] = state, _numbers(model)
    return record[1]


def is_of_model(model: nn.Module, canary: str) -> bool:
    """Whether a chunk's canary is that of a model as it is now, up to the noise of its dtype."""
    own = canary_of(model)
    if canary in (own, ""):
        return True
    stored, expected = _decoded(canary), _decoded(own)
    if stored is None or expected is None:
        return False
    error = token_errors(stored, expected)
    is_coarse = model.dtype not in TOLERANCE or getattr(model.config, "quantization_config", None) is not None
    # in 16 bits the median over the tokens: there one may be sent to another expert for a rounding error
    worst = float(error.median() if is_coarse else error.max())
    return worst <= (COARSE_TOLERANCE if is_coarse else TOLERANCE[model.dtype])


def _numbers(model: nn.Module) -> str:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text_config(model).vocab_size, (1, TOKENS), generator=draw)
    parts = []
    layers = capture(model, ids).layers
    last = [states for states in layers if states][-1]
    for states in (last[0], last[-1]):
        by_token = states[0].transpose(0, 1).flatten(1).float().cpu()  # [tokens, heads · width]
        signs = torch.randint(0, 2, (by_token.shape[1], NUMBERS // 2), generator=draw).float() * 2 - 1
        parts.append(by_token @ signs / math.sqrt(len(signs)))
    return base64.b64encode(torch.cat(parts, dim=1).contiguous().numpy().tobytes()).decode()


def _decoded(canary: str) -> Tensor | None:
    try:
        raw = base64.b64decode(canary, validate=True)
    except ValueError:
        return None
    if len(raw) != 4 * TOKENS * NUMBERS:
        return None
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(TOKENS, NUMBERS)
