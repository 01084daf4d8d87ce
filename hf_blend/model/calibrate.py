# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The checks before a model is first blended: short probes of the model itself, never a list of types.

Rotary styles: the same tokens are run at two positions. A layer can be moved if its values are equal at both, and if
one of the rotary styles maps its keys from one to the other. A model with any other layer is refused, and the layer is
named. The tokens come twice in the prompt, which shows positions that a model counts itself.

Ignored states: some code uses the state of a mixer only for a single token, and computes several tokens as if nothing
were before them (Jamba and Zamba in transformers 5.23). So states are set to zero. A state is ignored if that changes
what the model computes of one token, and not what it computes of several.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import plugins
from ..errors import UnsupportedModelError
from ..rotary.base import RotaryStyle, Table, at_the_end, compose, in_values, with_style_beside
from .anatomy import (
    LayerCall,
    cache_argument,
    canonical,
    decoder_layers,
    decoder_of,
    hooked,
    input_device,
    is_extended,
    is_quantised,
    notes_kept,
    per_model,
    refuse_other_states,
    stock_cache,
    stock_layers,
    text_config,
    text_ids,
)
from .capture import Capture, cached_prefix, capture
from .checks import (
    KV,
    LOGITS,
    PASSED,
    PROBING,
    CheckedModel,
    CheckResult,
    States,
    Use,
    allowed_of,
    check,
    ensure_passed,
    inconclusive,
    model_probe,
    norm_error,
    plain_noise,
    relative_error,
    set_passed,
    verdict_of,
    violations,
)
from .facts import read_facts, write_facts

PROBE_TOKENS = 20
PROBE_SHIFT = 37  # not a multiple of a head's width, so that no frequency comes back to where it was
STATE_KINDS = ("conv_states", "recurrent_states")
HELD_TOKENS, SEVERAL = 9, 4
NOISE_TOKENS = 24
BLEND = Use(
    "blend",
    __name__,
    "{} cannot be blended",
    "Use full prefill for this model, or pass allow_unverified=True to blend it all the same; run hf-blend verify.",
)
BESIDE = "what is kept beside the K/V (an indexer's keys, a mixer's projections)"


@dataclass
class _Probe:
    """What a model keeps of the same tokens at two positions."""

    model: nn.Module
    ids: Tensor
    here: Capture
    there: Capture
    worst: tuple[float, float] = (0.0, 1.0)  # the error nearest to what is allowed, and what is allowed

    @classmethod
    def of(cls, model: nn.Module) -> "_Probe":
        """Run the tokens twice; layers of a quantised model receive the same both times, or their noise adds up."""
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, text_config(model).vocab_size, (1, PROBE_TOKENS // 2), generator=draw).repeat(1, 2)
        places = torch.arange(PROBE_TOKENS)[None]
        with held_inputs(model) if is_quantised(model) else nullcontext():
            return cls(model, ids, capture(model, ids, places), capture(model, ids, places + PROBE_SHIFT))

    def tolerance(self, index: int, error: float) -> float:
        """How large an error in a layer may be, by the dtype."""
        allowed = max(allowed_of(KV, states.dtype) for states in self.here.layers[index])
        self.worst = max(self.worst, (error, allowed), key=lambda pair: pair[0] / pair[1])
        return allowed


@contextmanager
def held_inputs(model: nn.Module, rows: slice = slice(None)) -> Iterator[dict[int, Tensor]]:
    """Give every layer but the first what it received in the first forward inside of the block, in some rows.

    Yields what layers add to these rows, `[batch, rows, width]` by layer, in the last forward.
    """
    received: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}
    thread = threading.get_ident()  # others may run the model meanwhile

    def begins(index: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return None
        call = LayerCall.bind(layer, args, kwargs)
        hidden = call.hidden
        if index in received:
            hidden = hidden.clone()
            hidden[:, rows] = received[index]
        elif index:
            received[index] = hidden[:, rows].clone()
        added[index] = hidden[:, rows]
        return (hidden,), call.arguments

    def ends(index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if threading.get_ident() == thread:
            hidden = output[0] if isinstance(output, tuple) else output
            added[index] = hidden[:, rows] - added[index]

    layers = list(enumerate(decoder_layers(model)))
    with hooked(layers, begins), hooked(layers, ends, behind=True):
        yield added


def _styles_to_json(styles: Sequence[type[RotaryStyle]]) -> list[list[str]]:
    return [[style.__name__, style.beside.__name__ if style.beside else ""] for style in styles]


def _styles_of_json(rows: Sequence[Sequence[str]]) -> tuple[type[RotaryStyle], ...]:
    known: dict[str, type[RotaryStyle]] = {}
    for name in plugins.describe("rotary"):
        style = plugins.load("rotary", name)
        for candidate in (style, in_values(style), at_the_end(style)):
            known[candidate.__name__] = candidate
    return tuple(with_style_beside(known[own], known[beside]) if beside else known[own] for own, beside in rows)


@partial(model_probe, encode=_styles_to_json, decode=_styles_of_json)
def rotary_styles(model: nn.Module) -> CheckResult:
    """At another position each layer keeps the K and V that it had, but for what a known rotary style turns."""
    refuse_other_states(model)
    styles = [plugins.load("rotary", name) for name in plugins.describe("rotary")]
    try:
        with canonical(model):
            probe = _Probe.of(model)
            matched = tuple(_style_of(probe, index, styles) for index in range(len(probe.here.layers)))
            if first := probe.here.layers[0]:
                values = first[1 - matched[0].slot if len(first) > 1 else -1]
                why = "It adds positions to the embeddings that it counts itself."
                _refuse_moved(probe, 0, values.chunk(2, dim=-2), f"its values at two places of a prompt. {why}")
            return CheckResult(*probe.worst, value=matched)
    except UnsupportedModelError as error:
        if cause := shared_scale(model):
            raise UnsupportedModelError(f"{type(model).__name__} cannot be moved: {cause}") from error
        raise


def _refuse_moved(probe: _Probe, index: int, pair: Sequence[Tensor], what: str) -> None:
    """Refuse a model if a layer keeps something else of the same tokens at another position."""
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


def _nearest(probe: _Probe, index: int, columns: slice, candidates: list[type[RotaryStyle]]) -> type[RotaryStyle]:
    """The style that maps some of a layer's states from the first position to the second with the least error."""
    states, there = probe.here.layers[index][columns], probe.there.layers[index][columns]
    tables = probe.here.tables[index], probe.there.tables[index]
    errors = {style: _error(style, states, there, *tables) for style in candidates}
    ones = torch.ones(1, states[0].shape[-1])
    best = min(errors, key=lambda style: (errors[style], style.pairs(ones).shape[-1]))  # of equals what turns least
    tolerance = probe.tolerance(index, errors[best])
    if errors[best] > tolerance:
        what = BESIDE if columns.start else "the K/V"
        raise UnsupportedModelError(
            f"layer {index} of {type(probe.model).__name__} cannot be moved. {_cause(probe, index)} At two places "
            f"{what} of the same tokens differ by {errors[best]:.2g} of their size after the nearest rotary style "
            f"({best.__name__}), where {tolerance:g} is allowed. Use full prefill for this model."
        )
    return best


def _cause(probe: _Probe, index: int) -> str:
    if probe.here.tables[index] is None:
        return "It has no rotary table: its positions are learned, or added to the embeddings."
    return (
        "It turns its keys in a way that is not known here, or changes them by their positions otherwise, as a norm "
        "behind the rotation does."
    )


def _error(style: type[RotaryStyle], states: States, there: States, old: Table | None, new: Table | None) -> float:
    """The error of a style that moves states from one position to another; the largest of several tensors."""
    turning, moved = style.slot, [tensor.clone() for tensor in states]
    if old is not None and new is not None:
        device = states[turning].device  # of the layer; the model may make its tables on another
        cos, sin = (table.to(device) for table in compose(style, old, new))
        if 2 * cos.shape[-1] > states[turning].shape[-1]:
            return float("inf")
        style.move(states[turning], (cos[:, None], sin[:, None]), out=moved[turning])
    return max(relative_error(got, expected) for got, expected in zip(moved, there, strict=True))


@partial(model_probe, encode=bool, decode=bool)
def ignores_states(model: nn.Module) -> CheckResult:
    """Several tokens behind others feel every state of these that a cache holds, as one token does."""
    if not any(hasattr(layer, kind) for layer in stock_layers(text_config(model)) for kind in STATE_KINDS):
        return CheckResult(0.0, 0.0, value=False)
    with torch.inference_mode(False), canonical(model), notes_kept(model):
        ignored = bool(_felt(model, 1) - _felt(model, SEVERAL))
    why = f"the code of {type(model).__name__} ignores states before several tokens; they are refused."
    return CheckResult(float(ignored), 0.0, why, refused=ignored, value=ignored)


def _felt(model: nn.Module, tokens: int) -> set[str]:
    """The kinds of states that change the output, or the next states, of a forward of `tokens` tokens."""
    ids = text_ids(model, HELD_TOKENS + tokens)[None].to(input_device(model))

    def after(blank: str = "") -> list[Tensor]:
        cache, decoder = stock_cache(model), decoder_of(model)
        decoder(input_ids=ids[:, :HELD_TOKENS], **cache_argument(decoder, cache), use_cache=True)
        for layer in cache.layers:
            for state in getattr(layer, blank, {}).values() if blank else ():
                if state is not None:
                    state.zero_()
        output = decoder(input_ids=ids[:, HELD_TOKENS:], **cache_argument(decoder, cache), use_cache=True)
        states = (getattr(layer, kind, {}).values() for layer in cache.layers for kind in STATE_KINDS)
        return [output.last_hidden_state, *(state for by_index in states for state in by_index if state is not None)]

    plain = after()
    return {kind for kind in STATE_KINDS if not all(map(torch.equal, plain, after(kind)))}


@partial(per_model, encode=float, decode=float)
def quantisation_noise(model: nn.Module) -> float:
    """How far plain prefills of one prompt differ, as a share of the logits; 0 of a model that is not quantised."""
    if not is_quantised(model):
        return 0.0
    with canonical(model), notes_kept(model):
        ids = text_ids(model, NOISE_TOKENS)[None].to(input_device(model))
        return plain_noise(model, ids, NOISE_TOKENS // 4)


def ensure_trusted(
    model: nn.Module, make_cache: Callable[..., Any], allow_unverified: bool = False, folder: Path | None = None
) -> tuple[type[RotaryStyle], ...]:
    """Find out whether a model can be blended exactly, once for each dtype, attention and structure that it has.

    What is found out is kept in the folder of a store, if there is one, for other processes.
    """
    with PROBING:
        verdict = verdict_of(model, BLEND)
        if verdict == PASSED:
            return rotary_styles(model)
        is_new = verdict is None and not is_extended(model)
        if is_new and folder is not None and read_facts(model, folder):
            set_passed(model, BLEND)
            return rotary_styles(model)
        styles = rotary_styles(model)
        ensure_passed(CheckedModel(model, make_cache), BLEND, allow_unverified)
        if is_new and folder is not None and verdict_of(model, BLEND) == PASSED:
            cached_prefix(model)  # the first chunk that is computed asks for it
            quantisation_noise(model)
            write_facts(model, folder)
    return styles


@check(first_use="blend")
def own_scales(subject: CheckedModel) -> CheckResult:
    """No projection quantises a whole call by one scale, so a token is computed alike whatever runs beside it."""
    cause = shared_scale(subject.model)
    return violations([cause] if cause else [])


@check(first_use="blend")
@torch.no_grad()
def causal(subject: CheckedModel) -> CheckResult:
    """No token sees those behind it: another last token moves no logits before it.

    Logits that are no numbers are for the other checks.
    """
    model = subject.model
    ids = torch.tensor([subject.prompts[0].ids], device=input_device(model))
    if is_quantised(model):
        return _causal_layers(model, ids)
    changed = torch.cat((ids[:, :-1], ids[:, :1]), dim=1)
    before = model(ids, use_cache=False).logits
    after = model(changed, use_cache=False).logits
    ahead = norm_error(after[:, :-1], before[:, :-1])
    bound = allowed_of(LOGITS, model.dtype)
    detail = (
        "its tokens see those behind them. Another last token moves the logits of the others by "
        f"{ahead:.2g} of their size, where at most {bound:.2g} is expected."
    )
    if bound < ahead < float("inf"):
        return CheckResult(ahead, bound, detail)
    return CheckResult(0.0, bound)


def _causal_layers(model: nn.Module, ids: Tensor) -> CheckResult:
    """In a quantised model, whose noise adds up: another second half moves little of what a layer adds before it."""
    half = ids.shape[1] // 2
    with held_inputs(model, slice(half)) as added:
        model(ids, use_cache=False)
        before = dict(added)
        model(torch.cat((ids[:, :half], ids[:, : ids.shape[1] - half]), dim=1), use_cache=False)
        errors = [norm_error(added[index], before[index]) for index in before]
    ahead = max(errors)
    return CheckResult(
        ahead if ahead < float("inf") else 0.0,
        KV[-1],
        f"its tokens see those behind them: others there move by {ahead:.2g} of its size what layer "
        f"{errors.index(ahead)} adds before them, where its quantisation explains {KV[-1]:g} at most.",
    )


@check(first_use="blend")
def ratio_1(subject: CheckedModel) -> CheckResult:
    """Ratio 1.0 through the sparse path gives what a full prefill gives.

    The prefix is reused, every chunk token is recomputed as a chosen one. For each request alone; `verify` also looks
    at them side by side, padded on the left, and at the K and V of every layer.
    """
    results = []
    for prompts in subject.groups:
        got = subject.blend(prompts, 1.0)
        report = got.cache.report
        if not report.reusable_tokens or report.reusable_tokens != sum(map(len, report.chosen_columns)):
            return inconclusive(f"the sparse path was not taken: {report.fallback_reason or report}")
        results.append(subject.compare_with_plain(got))
    worst = max(results, key=lambda result: (not result.passed, result.error))
    return CheckResult(worst.error, worst.tolerance, worst.detail and f"with every token recomputed {worst.detail}")


@torch.no_grad()
def shared_scale(model: nn.Module) -> str:
    """Say which projection of a model gives a token another result beside a larger one."""
    for name, module in decoder_layers(model)[0].named_modules():
        width = getattr(module, "in_features", None)
        if isinstance(width, int):
            alone, beside = _beside(module, width, input_device(model), model.dtype)
            if (beside - alone).norm() > 0.1 * alone.norm():
                kind = f"{type(module).__module__}.{type(module).__qualname__}"
                return (
                    f"{name} ({kind}) quantises all tokens of a call by one scale, so what it gives for "
                    "a token depends on those beside it. Quantise weights alone, or each token by itself."
                )
    return ""


def _beside(module: nn.Module, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a projection gives for a random token, alone and beside one that is a hundred times as large."""
    draw = torch.Generator().manual_seed(0)
    tokens = (torch.randn(2, width, generator=draw) * torch.tensor([[1.0], [100.0]])).to(device, dtype)
    try:
        return module(tokens[:1]).float(), module(tokens)[:1].float()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it reads more, or something else
        return torch.zeros(1), torch.zeros(1)
