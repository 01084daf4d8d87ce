# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Find out, by a short probe of the model itself, how the keys of each layer turn.

The same tokens are run at two places. A layer whose values agree and whose keys map from one place to the other by
some style can be moved; a model with a layer that does neither cannot be blended, and the layer is named. The tokens
come twice in the prompt: that shows positions which a model counts itself, whatever it is told.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from . import plugins
from .anatomy import refuse_other_states, text_config
from .capture import Capture, capture
from .errors import UnsupportedModelError
from .rotary.base import RotaryStyle, compose, in_values
from .rotary.tables import Table

PROBE_TOKENS = 20
PROBE_SHIFT = 37  # not a multiple of a head's width, so that no frequency comes back to where it was
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}  # relative; a wrong style is off by about 1
COARSE_TOLERANCE = 0.1  # bfloat16 and float16, and models whose matrix products are quantised

_known: WeakKeyDictionary[nn.Module, tuple[type[RotaryStyle], ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Misfit:
    """The style that came nearest for a layer that did not map."""

    layer: int
    error: float


def rotary_styles(model: nn.Module) -> tuple[type[RotaryStyle], ...]:
    """The rotary style of each layer, probed at first use and remembered while the model lives.

    Args:
        model: the model to probe with two forwards of 20 tokens.

    Returns:
        One style per decoder layer.

    Raises:
        UnsupportedModelError: a layer's K/V do not map from one place to another; it is named.
    """
    if model not in _known:
        _known[model] = _calibrate(model)
    return _known[model]


def _calibrate(model: nn.Module) -> tuple[type[RotaryStyle], ...]:
    refuse_other_states(model)
    vocabulary = text_config(model).vocab_size
    ids = torch.randint(0, vocabulary, (1, PROBE_TOKENS // 2), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    places = torch.arange(PROBE_TOKENS)[None]
    here, there = capture(model, ids, places), capture(model, ids, places + PROBE_SHIFT)
    styles = [plugins.load("rotary", name) for name in plugins.describe("rotary")]
    candidates = [*styles, *map(in_values, styles)]
    found = tuple(_style_of(model, index, here, there, candidates) for index in range(len(here.layers)))
    _refuse_counted_positions(model, here.layers[0][1 - found[0].slot])
    return found


def _refuse_counted_positions(model: nn.Module, states: Tensor) -> None:
    """Refuse a model whose first layer has other values for the same token at another place of a prompt."""
    error = relative_error(*states.chunk(2, dim=-2))
    tolerance = TOLERANCE.get(states.dtype, COARSE_TOLERANCE)
    if error > tolerance:
        raise UnsupportedModelError(
            f"layer 0 of {type(model).__name__} cannot be moved: its values for the same tokens at two places of a "
            f"prompt differ by {error:.2g} of their size, where {tolerance:g} is allowed. It adds positions to the "
            "embeddings that it counts itself. Use full prefill for this model."
        )


def _style_of(
    model: nn.Module, index: int, here: Capture, there: Capture, candidates: list[type[RotaryStyle]]
) -> type[RotaryStyle]:
    pair, there_pair = here.layers[index], there.layers[index]
    tolerance = TOLERANCE.get(pair[0].dtype, COARSE_TOLERANCE)
    tables = here.tables[index], there.tables[index]
    errors = {style: _error(style, pair, there_pair, *tables) for style in candidates}
    probe = torch.ones(1, pair[0].shape[-1])
    best = min(errors, key=lambda style: (errors[style], style.pairs(probe).shape[-1]))  # of equals what turns least
    if errors[best] > tolerance:
        raise UnsupportedModelError(
            f"layer {index} of {type(model).__name__} cannot be moved: the K/V of the same tokens at two "
            f"places differ by {errors[best]:.2g} of their size after the nearest rotary style ({best.__name__}), "
            f"where {tolerance:g} is allowed. {_cause(tables[0])} Use full prefill for this model."
        )
    return best


def _cause(table: Table | None) -> str:
    if table is None:
        return "It has no rotary table: its positions are learned, or added to the embeddings."
    return "It turns its keys in a way that is not known here, or changes them by their positions otherwise."


def _error(
    style: type[RotaryStyle],
    states: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
    old: Table | None,
    new: Table | None,
) -> float:
    """How far a style is from taking (K, V) of one place to those of another; the worse of the two tensors."""
    turning, moved = style.slot, [part.clone() for part in states]
    if old is not None and new is not None:
        device = states[turning].device  # of the layer; the model may make its tables on another
        cos, sin = (part.to(device) for part in compose(style, old, new))
        if 2 * cos.shape[-1] > states[turning].shape[-1]:
            return float("inf")
        style.move(states[turning], (cos[:, None], sin[:, None]), out=moved[turning])
    return max(relative_error(got, there) for got, there in zip(moved, wanted, strict=True))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference of two tensors `[…, tokens, width]`, over the largest size of the second.

    In 16 bits the median over the tokens: there a token may be sent to another expert for a rounding error, while a
    wrong style shows at every token.
    """
    scale = wanted.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    by_token = (got.float() - wanted.float()).abs().movedim(-2, 0).flatten(1).amax(dim=1) / scale
    return float(by_token.amax() if wanted.dtype in TOLERANCE else by_token.median())
