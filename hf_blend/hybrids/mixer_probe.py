# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Find the mixers of a model, their projections, and the columns of these that affect another token.

Nothing here knows the name of a module. A mixer is what hands a state to the cache. A linear module inside it is an
input projection if its output at a token stays when every other token changes. A column of it is felt if a gradient
reaches it from the output at another token; modules of which nobody else feels any, gates and the output projection,
are computed for active rows only, and nothing of them is stored. Then the whole is tried: with what would be stored,
and nothing in the place of all else, the active rows must come out as in a plain forward.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ..errors import UnsupportedModelError
from ..model.anatomy import (
    Spans,
    cache_argument,
    canonical,
    decoder_layers,
    decoder_of,
    full_cache,
    hooked,
    input_device,
    is_linear,
    parameter_names,
    stock_layers,
    text_config,
)
from ..model.checks import FAILURES, CheckResult, allowed_of, model_probe
from .mixer import ActiveRows, Mixer, MixerPass, Projection, regular

__all__ = ["mixers_of"]

TOKENS = 24
SEEN_FROM = (5, 11)  # the tokens whose columns are looked at from the others
OFFSETS = (0.0, 0.0, -4.0, 4.0)  # the first stands for the outputs as they are
ACTIVE = (0, 2, 3, 7, 8, 13, 20, 23)  # the rows of the trial
CHANGE = (1e-9, 1e-4, 0.05)  # relative, by dtype; what depends on another token moves by about 1


@dataclass
class _Call:
    """A mixer as the decoder called it."""

    module: nn.Module
    arguments: dict[str, Any]
    hidden_name: str

    def run(self, model: nn.Module, hidden: Tensor, **changes: Any) -> Tensor:
        """Its output for other hidden states, with a cache of its own."""
        cache = full_cache(model)
        arguments = {**self.arguments, **changes, self.hidden_name: hidden}
        arguments = {name: cache if value is _CACHE else value for name, value in arguments.items()}
        output = self.module(**arguments)
        outputs = output if isinstance(output, tuple) else (output,)
        states = [state for state in outputs if isinstance(state, Tensor) and state.dim() == 3]
        return torch.cat([state for state in states if state.shape[:2] == hidden.shape[:2]], dim=-1)


@dataclass
class _Entrance:
    """How a kind of mixer is entered."""

    columns: Mapping[str, Tensor | None]
    inputs: set[str]
    error: float = 0.0  # of its rows in the trial


_CACHE = object()  # stands for the cache among the arguments of a call


@model_probe
def mixers_of(model: nn.Module) -> CheckResult:
    """The rows of every mixer that are computed among stored ones are those of a plain forward."""
    layers = decoder_layers(model)
    if not any(hasattr(layer, "recurrent_states") for layer in stock_layers(text_config(model))):
        return CheckResult(0.0, 0.0, value=(None,) * len(layers))
    with canonical(model):
        calls = _calls(model, _modules(model, layers))
        of_kind: dict[Any, _Entrance] = {}
        mixers: dict[int, Mixer] = {}
        for index, call in calls.items():
            kind = (type(call.module), *((name, _features(linear)) for name, linear in _linears(call.module)))
            if kind not in of_kind:  # layers of one kind differ in nothing but their weights
                of_kind[kind] = _examined(model, index, call)
            mixers[index] = _mixer(call.module, of_kind[kind])
    worst = max((entrance.error for entrance in of_kind.values()), default=0.0)
    of_layers = tuple(mixers.get(index) for index in range(len(layers)))
    return CheckResult(worst, allowed_of(CHANGE, model.dtype), value=of_layers)


def _run(model: nn.Module, cache: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text_config(model).vocab_size, (1, TOKENS), generator=draw).to(input_device(model))
    decoder_of(model)(input_ids=ids, **cache_argument(decoder_of(model), cache), use_cache=True)


def _modules(model: nn.Module, layers: Sequence[nn.Module]) -> dict[int, nn.Module]:
    """By layer, the innermost module with all the modules that pass a state to the cache."""
    owners: dict[int, list[list[nn.Module]]] = {}
    running: list[tuple[int, nn.Module]] = []  # from a layer inwards, each with the number of the layer
    cache = full_cache(model)
    thread = threading.get_ident()  # others may run the model meanwhile

    def begins(index: int, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == thread:
            running.append((index, module))

    def ends(*_: Any) -> None:
        if threading.get_ident() == thread:
            running.pop()

    def updated(update: Any, *args: Any, **kwargs: Any) -> Any:
        if running:
            inside = [module for _, module in running[1:]]
            owners.setdefault(running[0][0], []).append(inside)
        return update(*args, **kwargs)

    for name in ("update_conv_state", "update_recurrent_state"):
        setattr(cache, name, partial(updated, getattr(cache, name)))
    modules = [(index, module) for index, layer in enumerate(layers) for module in layer.modules()]
    try:
        with hooked(modules, begins), hooked(modules, ends, behind=True):
            _run(model, cache)
    except FAILURES as error:
        message = f"{type(model).__name__} cannot be blended: {type(error).__name__}: {error} Use full prefill."
        raise UnsupportedModelError(message) from error
    stock = stock_layers(text_config(model))
    if stock and not any(isinstance(layer, CacheLayerMixin) for layer in stock):
        raise _refusal(model, 0, "no layer keeps K and V of its tokens, which could be reused")
    for index, layer in enumerate(stock):
        if hasattr(layer, "recurrent_states") and index not in owners:
            raise _refusal(model, index, "none of it came to the cache with which the model was called")
    return {index: _innermost(model, index, paths) for index, paths in owners.items()}


def _innermost(model: nn.Module, index: int, paths: list[list[nn.Module]]) -> nn.Module:
    shared = [modules[0] for modules in zip(*paths, strict=False) if len(set(modules)) == 1]
    if not shared:
        names = ", ".join(dict.fromkeys(type(path[-1]).__name__ for path in paths if path))
        raise _refusal(model, index, f"its states come from several modules ({names or 'the layer itself'})")
    return shared[-1]


def _calls(model: nn.Module, modules: Mapping[int, nn.Module]) -> dict[int, _Call]:
    """How the decoder calls each mixer, for plain tokens."""
    calls: dict[int, _Call] = {}
    cache = full_cache(model)

    def note(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = parameter_names(type(module))  # type: ignore[arg-type]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {name: _CACHE if value is cache else value for name, value in arguments.items()}
        if index in calls or not names or not isinstance(arguments.get(names[0]), Tensor):
            raise _refusal(model, index, "its mixer is called twice, or without hidden states")
        calls[index] = _Call(module, arguments, names[0])

    with hooked(modules.items(), note):
        _run(model, cache)
    return calls


def _examined(model: nn.Module, index: int, call: _Call) -> _Entrance:
    """Find out how a mixer is entered, and try it."""
    try:
        hidden = call.arguments[call.hidden_name]
        expected = call.run(model, hidden)
        outputs = _outputs(model, call, hidden)
        inputs = _input_projections(model, call, hidden, outputs)
        felt = _felt(model, call, hidden, [*outputs], inputs)
        every = {name: None if name in inputs else columns for name, columns in felt.items()}
        complaint = ""
        for columns in (felt, every):
            entrance = _Entrance(columns, inputs)
            complaint, entrance.error = _tried(model, call, _mixer(call.module, entrance), hidden, expected)
            if not complaint:
                return entrance
    except FAILURES as error:
        complaint = f"{type(error).__name__}: {error}"
    raise _refusal(model, index, f"its mixer, {type(call.module).__name__}, cannot be entered by rows: {complaint}")


def _outputs(model: nn.Module, call: _Call, hidden: Tensor) -> dict[str, Tensor]:
    """The outputs of the linear modules that see every token once, by name, in the order of their calls."""
    outputs: dict[str, list[Tensor]] = {}

    def note(name: str, _: nn.Module, args: tuple[Any, ...], __: object, output: Tensor) -> None:
        if output.dim() == 3 and output.shape[:2] == hidden.shape[:2]:
            outputs.setdefault(name, []).append(output)

    with hooked(_linears(call.module), note, behind=True):
        call.run(model, hidden)
    return {name: calls[0] for name, calls in outputs.items() if len(calls) == 1}


def _input_projections(model: nn.Module, call: _Call, hidden: Tensor, before: Mapping[str, Tensor]) -> set[str]:
    """The linear modules whose output at a token stays when all other tokens change."""
    alone = {*before}
    for token in SEEN_FROM:
        other = _garbage(hidden, seed=token)
        other[:, token] = hidden[:, token]
        after = _outputs(model, call, other)
        for name, output in before.items():
            change = _change(after[name][:, token], output[:, token])
            if not change <= allowed_of(CHANGE, hidden.dtype):
                alone.discard(name)
    return alone


def _felt(
    model: nn.Module, call: _Call, hidden: Tensor, names: list[str], inputs: set[str]
) -> dict[str, Tensor | None]:
    """For each linear module the columns, `[width]`, that affect another token; None: all of them."""
    try:
        gradients = _gradients(model, call, hidden, names, inputs)
    except FAILURES:  # no gradient to be had, as with quantised weights
        return dict.fromkeys(inputs)
    felt: dict[str, Tensor | None] = {}
    for name, gradient in gradients.items():
        total = gradient[:, list(SEEN_FROM)].abs().float().sum(dim=(0, 1))
        columns = total.nonzero().flatten()
        if name in inputs or not len(columns):
            felt[name] = None if len(columns) == len(total) else columns
    return felt


def _gradients(model: nn.Module, call: _Call, hidden: Tensor, names: list[str], inputs: set[str]) -> dict[str, Tensor]:
    """How the output at the other tokens depends on each linear module's output, `[points, tokens, features]`."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, *args: Any) -> Tensor:
        output: Tensor = args[-1]
        if output.shape[1] != TOKENS:
            return output
        if name in inputs:  # what is stored stands between it and whatever made its input
            kept[name] = _points(output.detach()).requires_grad_()
            return kept[name]
        if output.requires_grad:
            kept[name] = output
            output.retain_grad()
        return output

    with torch.enable_grad(), hooked(_linears(call.module, names), keep, behind=True):
        output = call.run(model, hidden.repeat(len(OFFSETS), 1, 1))
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
        weights[:, list(SEEN_FROM)] = 0
        (output * weights).sum().backward(inputs=list(kept.values()))
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in kept.items()}


def _points(output: Tensor) -> Tensor:
    """Where gradients are taken: the outputs as they are, and at some offsets, since an effect may saturate."""
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    shares = torch.tensor([1.0, *(0.0 for _ in OFFSETS[1:])]).to(output)[:, None, None]
    return output * shares + (noise + torch.tensor(OFFSETS).to(output)[:, None, None]) * (1 - shares)


def _mixer(module: nn.Module, entrance: _Entrance) -> Mixer:
    projections: list[Projection] = []
    start = full_width = 0
    for name, linear in _linears(module):
        features = _features(linear)
        full_width += features if name in entrance.inputs else 0
        if name in entrance.columns:
            spans = _spans(entrance.columns[name], features, start)
            projections.append(Projection(linear, features, spans))
            start += projections[-1].width
    return Mixer(module, tuple(projections), start, full_width)


def _spans(columns: Tensor | None, features: int, start: int) -> tuple[tuple[slice, slice], ...]:
    """The columns that are stored (None: all of them), and where they are stored, from `start` on."""
    spans: list[tuple[slice, slice]] = []
    for run in regular(range(features) if columns is None else columns.tolist()):
        spans.append((run, slice(start, start + len(range(features)[run]))))
        start = spans[-1][1].stop
    return tuple(spans)


def _tried(model: nn.Module, call: _Call, mixer: Mixer, hidden: Tensor, expected: Tensor) -> tuple[str, float]:
    """Why a mixer fails, "" if it does not: its active rows among garbage must be those of a plain forward."""
    if not mixer.width:
        return "no projection of it is felt by another token", 0.0
    cache, rows = full_cache(model), ActiveRows(None, TOKENS)
    run = MixerPass(mixer, cache, rows)
    _passed(model, call, run, hidden, cache)
    states: Tensor = run.states
    columns = torch.tensor([ACTIVE], device=hidden.device)
    rows = ActiveRows(columns, TOKENS)
    cache, stored_states = full_cache(model), states.clone()
    stored_states[:, columns[0]] = _garbage(stored_states, seed=1)[:, columns[0]]  # to be computed

    def write(into: Tensor, spans: Spans) -> None:
        for where, stored in spans:
            into[..., where] = stored_states[..., stored]

    run = MixerPass(mixer, cache, rows, write)
    got = _passed(model, call, run, hidden[:, columns[0]], cache)
    if got.shape[:2] != columns.shape:
        return f"its output has the shape {tuple(got.shape)} for {len(ACTIVE)} rows", float("inf")
    error = _change(got, expected[:, columns[0]])
    if not error <= allowed_of(CHANGE, expected.dtype):
        return "with stored projections its rows are not those of a plain forward", error
    if not _change(run.states, states) <= allowed_of(CHANGE, states.dtype):
        return "its projections of some rows are not those of a plain forward", error
    return "", error


def _passed(model: nn.Module, call: _Call, run: MixerPass, hidden: Tensor, cache: Any) -> Tensor:
    changes = {name: cache for name, value in call.arguments.items() if value is _CACHE}
    run.enter()
    try:
        return call.run(model, hidden, **changes)
    finally:
        run.leave()


def _linears(module: nn.Module, names: Sequence[str] | None = None) -> Iterator[tuple[str, nn.Module]]:
    for name, inner in module.named_modules():
        if is_linear(inner) and (names is None or name in names):
            yield name, inner


def _features(linear: nn.Module) -> int:
    return int(linear.out_features)


def _garbage(like: Tensor, seed: int) -> Tensor:
    noise = torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)
    return noise * like.float().std().clamp_min(1e-6).to(like)


def _change(got: Tensor, expected: Tensor) -> float:
    size = expected.float().abs().amax().clamp_min(1e-30)
    return float((got.float() - expected.float()).abs().amax() / size)


def _refusal(model: nn.Module, index: int, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {index} of {type(model).__name__} keeps a state of all tokens before, and {what}. Use full prefill "
        "for this model."
    )
