# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Find out, by a short probe of the model itself, how the keys of each layer turn.

The same tokens are run at two places. A layer whose values agree and whose keys map from one place to the other by
some style can be moved; a model with a layer that does neither cannot be blended, and the layer is named. The tokens
come twice in the prompt: that shows positions which a model counts itself, whatever it is told.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import UnsupportedModelError
from ..rotary.base import RotaryStyle, at_the_end, compose, in_values, with_style_beside
from ..rotary.tables import Table
from .anatomy import decoder_layers, refuse_other_states, text_config
from .capture import Capture, capture
from .fingerprint import PerStructure
from .identity.canonical import canonical
from .quantised import shared_scale

PROBE_TOKENS = 20
PROBE_SHIFT = 37  # not a multiple of a head's width, so that no frequency comes back to where it was
TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}  # relative; a wrong style is off by about 1
COARSE_TOLERANCE = 0.1  # bfloat16 and float16
NUDGE = 1e-4  # of hidden states: a change by so little shows how far a model magnifies what is no difference
FLOORS = 4.0  # one nudge is a small sample of the noise, so this many of it are allowed
MOST_TOLERANCE = 0.2  # of a measured floor: beyond it a wrong style could pass
BESIDE = "what is kept beside the K/V (an indexer's keys, a mixer's projections)"


@dataclass
class _Probe:
    """The same tokens at two places of one model, and the noise between them that its products make by themselves."""

    model: nn.Module
    ids: Tensor
    here: Capture
    there: Capture

    @classmethod
    def of(cls, model: nn.Module) -> "_Probe":
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, text_config(model).vocab_size, (1, PROBE_TOKENS // 2), generator=draw).repeat(1, 2)
        places = torch.arange(PROBE_TOKENS)[None]
        return cls(model, ids, capture(model, ids, places), capture(model, ids, places + PROBE_SHIFT))

    def tolerance(self, index: int, error: float) -> float:
        """What an error in a layer may be: by the dtype or, where that does not do, by the model's own noise."""
        allowed = TOLERANCE.get(self.here.layers[index][-1].dtype, COARSE_TOLERANCE)
        if error <= allowed or allowed == COARSE_TOLERANCE:
            return allowed
        return max(allowed, min(MOST_TOLERANCE, FLOORS * self.floors[index]))

    @cached_property
    def floors(self) -> list[float]:
        """How far each layer's K and V move when what goes into it and the layers before is nudged by next to nothing.

        Where matrix products are rounded, as those of 4-bit weights are to bfloat16 on some CPUs, it is a lot.
        """
        draw = torch.Generator().manual_seed(0)

        def nudge(_: nn.Module, __: object, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            nudged = states * (1 + NUDGE * (2 * torch.rand(states.shape, generator=draw).to(states) - 1))
            return (nudged, *output[1:]) if isinstance(output, tuple) else nudged

        with ExitStack() as stack:
            for module in (self.model.get_input_embeddings(), *decoder_layers(self.model)):
                stack.callback(module.register_forward_hook(nudge).remove)
            nudged = capture(self.model, self.ids, torch.arange(PROBE_TOKENS)[None])
        pairs = zip(nudged.layers, self.here.layers, strict=True)
        return [max(map(relative_error, got, expected), default=0.0) for got, expected in pairs]


@PerStructure
def rotary_styles(model: nn.Module) -> tuple[type[RotaryStyle], ...]:
    """The rotary style of each layer, probed at first use and remembered while the model has the same structure."""
    refuse_other_states(model)
    styles = [plugins.load("rotary", name) for name in plugins.describe("rotary")]
    try:
        with canonical(model):
            probe = _Probe.of(model)
            found = tuple(_style_of(probe, index, styles) for index in range(len(probe.here.layers)))
            if first := probe.here.layers[0]:
                values = first[1 - found[0].slot if len(first) > 1 else -1]
                why = "It adds positions to the embeddings that it counts itself."
                _refuse_moved(probe, 0, values.chunk(2, dim=-2), f"its values at two places of a prompt. {why}")
            return found
    except UnsupportedModelError as error:
        if cause := shared_scale(model):
            raise UnsupportedModelError(f"{type(model).__name__} cannot be moved: {cause}") from error
        raise


def _refuse_moved(probe: _Probe, index: int, pair: Sequence[Tensor], what: str) -> None:
    """Refuse a model in one of whose layers something differs for the same tokens."""
    error = relative_error(*pair)
    tolerance = probe.tolerance(index, error)
    if error > tolerance:
        raise UnsupportedModelError(
            f"layer {index} of {type(probe.model).__name__} cannot be moved: for the same tokens a difference of "
            f"{error:.2g} of the size was found, where {tolerance:g} is allowed, in {what} Use full prefill for this "
            "model."
        )


def _style_of(probe: _Probe, index: int, styles: list[type[RotaryStyle]]) -> type[RotaryStyle]:
    states = probe.here.layers[index]
    if len(states) == 1:
        pair = states[-1], probe.there.layers[index][-1]
        _refuse_moved(probe, index, pair, "what its mixer projects at two positions.")
    if len(states) < 2:
        return plugins.load("rotary", "unrotated")
    own = _nearest(probe, index, slice(0, 2), [*styles, *map(in_values, styles)])
    if len(states) < 3:
        return own
    return with_style_beside(own, _nearest(probe, index, slice(2, 3), [*styles, *map(at_the_end, styles)]))


def _nearest(probe: _Probe, index: int, part: slice, candidates: list[type[RotaryStyle]]) -> type[RotaryStyle]:
    """The style that takes a part of what a layer keeps from one place to the other."""
    states, there = probe.here.layers[index][part], probe.there.layers[index][part]
    tables = probe.here.tables[index], probe.there.tables[index]
    errors = {style: _error(style, states, there, *tables) for style in candidates}
    ones = torch.ones(1, states[0].shape[-1])
    best = min(errors, key=lambda style: (errors[style], style.pairs(ones).shape[-1]))  # of equals what turns least
    tolerance = probe.tolerance(index, errors[best])
    if errors[best] > tolerance:
        what = BESIDE if part.start else "the K/V"
        raise UnsupportedModelError(
            f"layer {index} of {type(probe.model).__name__} cannot be moved. {_cause(probe, index)} At two places "
            f"{what} of the same tokens differ by {errors[best]:.2g} of their size after the nearest rotary style "
            f"({best.__name__}), where {tolerance:g} is allowed. Use full prefill for this model."
        )
    return best


def _cause(probe: _Probe, index: int) -> str:
    if probe.here.tables[index] is None:
        return "It has no rotary table: its positions are learned, or added to the embeddings."
    norm = _norm_behind(probe, index)
    if norm:
        return (
            f"It normalises its keys behind their rotation ({norm}): where two dimensions that turn together have "
            "other weights, attention depends on where tokens are, and not only on how far apart."
        )
    return "It turns its keys in a way that is not known here, or changes them by their positions otherwise."


def _norm_behind(probe: _Probe, index: int) -> str:
    """The name of the module with a weight for each dimension whose output a layer's keys are; empty if none is."""
    layer, names = decoder_layers(probe.model)[index], list[str]()
    keys, thread = probe.here.layers[index][0], threading.get_ident()

    def look(name: str, output: Any) -> None:
        forms = (output, output.transpose(1, 2)) if isinstance(output, Tensor) and output.dim() == 4 else ()
        if threading.get_ident() == thread and any(torch.equal(form, keys) for form in forms):
            names.append(name)

    with ExitStack() as stack:
        for name, module in layer.named_modules():
            if getattr(getattr(module, "weight", None), "ndim", 0) == 1:
                hook = lambda _, __, output, name=name: look(name, output)  # noqa: E731
                stack.callback(module.register_forward_hook(hook).remove)
        capture(probe.model, probe.ids, torch.arange(PROBE_TOKENS)[None])
    return names[0] if names else ""


def _error(
    style: type[RotaryStyle],
    states: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
    old: Table | None,
    new: Table | None,
) -> float:
    """How far a style is from taking the states of one place to those of another; the worse of several tensors."""
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
