# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks: claims about a model that are measured on it, some before its first use, all by `hf-blend verify`.

A check is a function that measures an error and gives a tolerance: 0 where the claim is about bits, else a measured
floor or a count of roundings. It must be able to fail: where a claim would hold because nothing happened, it checks
that something did.

A check with a `first_use` is run once before a model is used in that way, on one short prompt or on the caller's own
forward. A mask, a position or a cache that a family treats in its own way shows there as a large error. Noise stays
below the bound of the dtype, or near the difference of one plain forward and two that continue each other. A
`model_probe` is a check that finds something out, such as the rotary style of each layer; it is run where needed.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import HfBlendError, UnsupportedModelError
from ..prompt.pieces import Prompt
from .anatomy import (
    PER_TOKEN,
    cache_argument,
    canonical,
    full_cache,
    input_device,
    is_extended,
    is_quantised,
    notes_kept,
    per_model,
    text_config,
    text_ids,
)
from .identity import structure_of

logger = logging.getLogger(__name__)

LENGTHS = (2, 8, 8, 6)  # tokens of the prefix, the chunks and the question of the prompt at first use
FINE = (torch.float64, torch.float32)
LOGITS = (1e-6, 1e-3, 0.05)  # share of their size: float64, float32, coarser; what is wrong is off by about 0.3
KV = (1e-6, 2e-3, 0.1)  # of K and V; a wrong style is off by about 1
FLOORS = 4.0  # one comparison of two plain forwards is a small sample of the noise, so this many of it are allowed
MOST_ALLOWED = 0.2  # a plain model that is further from itself in two pieces says nothing about noise
FAILURES = (ArithmeticError, AttributeError, HfBlendError, LookupError, RuntimeError, TypeError, ValueError)
Measure = Callable[[Any], Any]  # of a subject, a `CheckResult`; None: nothing could be tried
States = tuple[Tensor, ...]  # (K, V) of a layer, or () where it keeps none


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        error: the largest that was measured.
        tolerance: what is allowed.
        detail: what is wrong, in words.
        refused: hf_blend refuses the model the use that the claim is about, so nothing is claimed.
        value: what a `model_probe` found out.
    """

    error: float
    tolerance: float
    detail: str = ""
    refused: bool = False
    value: Any = None

    @property
    def passed(self) -> bool | None:
        """Whether the claim holds; an error that is not a number does not. None: nothing is claimed of this model."""
        return None if self.refused else self.error <= self.tolerance


@dataclass(frozen=True)
class Check:
    """A claim about a model, and the function that measures it on a subject of the class `needs`."""

    name: str
    claim: str
    measure: Measure
    first_use: str = ""
    overridable: bool = True
    needs: type = object


@dataclass(frozen=True)
class Use:
    """A way to use a model: the module that has its checks, and what is said where one of them fails."""

    name: str
    module: str
    refusal: str
    do: str


CHECKS: dict[str, Check] = {}
_complaints: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[str, bool]]] = WeakKeyDictionary()  # "": none
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_testing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
PASSED = ("", True)
PROBING = threading.RLock()


def check(first_use: str = "", overridable: bool = True, needs: type = object) -> Callable[[Measure], Measure]:
    """Register a function as a check under its own name; the first line of its docstring is the claim."""

    def register(measure: Measure) -> Measure:
        name, claim = measure.__name__, (measure.__doc__ or "").partition("\n")[0]
        CHECKS[name] = Check(name, claim, measure, first_use, overridable, needs)
        return measure

    return register


def model_probe(
    find: Callable[[nn.Module], CheckResult],
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> Callable[[nn.Module], Any]:
    """Register a function of a model as a check; a call gives the result's `value`, or raises the function's error.

    `encode` and `decode` as for `per_model`.
    """

    def measure(subject: Any) -> CheckResult:
        try:
            return find(subject.model)
        except UnsupportedModelError as error:
            return violations([str(error)])

    measure.__name__, measure.__doc__ = find.__name__, find.__doc__
    check()(measure)

    @wraps(find)
    def value(model: nn.Module) -> Any:
        return find(model).value

    return per_model(value, encode, decode)


def violations(details: list[str]) -> CheckResult:
    """Count the things that are wrong, of which none is allowed."""
    return CheckResult(float(len(details)), 0.0, "; ".join(details[:3]))


def inconclusive(why: str) -> CheckResult:
    """Fail a check under which nothing happened that could have been wrong."""
    return CheckResult(float("inf"), 0.0, why)


def refused(error: object) -> CheckResult:
    """Neither pass nor fail a check: hf_blend refuses the model the use that the claim is about."""
    return CheckResult(float("inf"), 0.0, str(error), refused=True)


@dataclass(frozen=True)
class Comparison:
    """One tensor beside what it must equal; `layer` is None for logits."""

    name: str
    got: Tensor
    expected: Tensor
    layer: int | None = None


@dataclass
class BlendedPrefill:
    """A blended prefill: its cache, and the logits of the questions' rows."""

    cache: Any
    logits: Tensor
    prompts: Sequence[Prompt]

    @property
    def layers(self) -> list[States]:
        """(K, V) of each layer, `[batch, kv_heads, tokens, head_dim]`; () where it keeps none."""
        return kv_of(self.cache)


class CheckedModel:
    """A model at its first use, with one short prompt; errors are judged by the bounds of the dtype."""

    sequence_tokens = 18  # of a sequence that is moved
    must_show = False  # whether a claim that nothing could have broken fails; one short prompt shows little
    kind: Any = ()  # of what is tried, where a model is used in several ways that are tried one by one

    def __init__(self, model: nn.Module, make_cache: Callable[..., Any] | None = None) -> None:
        """Prepare; `make_cache(model, **settings)` gives a cache on an empty store."""
        self.model, self.name = model, type(model).__name__
        self._make_cache: Any = make_cache

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Random prefix, two chunks and question; text only."""
        prefix, *chunks, question = (self.ids(count, seed) for seed, count in enumerate(LENGTHS))
        return [Prompt.of_pieces(prefix, chunks, question)]

    @property
    def groups(self) -> list[Sequence[Prompt]]:
        """The prompts as they come in one request."""
        return [[prompt] for prompt in self.prompts]

    def ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Random tokens of text."""
        return tuple(text_ids(self.model, count, seed).tolist())

    def cache(self, ratio: float, store: Any = None, selector: str = "kv-deviation", **settings: Any) -> Any:
        """A cache for a request."""
        return self._make_cache(self.model, recompute_ratio=ratio, selector=selector, chunk_prefix_ids=(), **settings)

    def inputs(self, cache: Any, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Announce prompts to a cache, and give what the model is called with."""
        pieces: dict[str, Any] = {"prefix": [p.prefix for p in prompts], "chunks": [p.chunks for p in prompts]}
        inputs: dict[str, Tensor] = cache.inputs(None, **pieces, question=[p.question for p in prompts])
        return inputs

    @torch.no_grad()
    def forward(self, cache: Any, inputs: dict[str, Tensor], rows: int) -> Tensor:
        """One forward with a cache, entered as `generate` enters: logits of the last rows, float32."""
        few = {name: False for name in PER_TOKEN if getattr(text_config(self.model), name, False)}
        output = self.model(**inputs, **cache_argument(self.model, cache), use_cache=True, logits_to_keep=rows, **few)
        logits: Tensor = output.logits.float()
        return logits

    def prefill(self, cache: Any, prompts: Sequence[Prompt]) -> Tensor:
        """Prefill prompts with a cache: logits of the questions' rows."""
        return self.forward(cache, self.inputs(cache, prompts), question_rows(prompts))

    def blend(self, prompts: Sequence[Prompt], ratio: float, store: Any = None, **settings: Any) -> BlendedPrefill:
        """Prefill prompts with stored chunks."""
        cache = self.cache(ratio, store, **settings)
        return BlendedPrefill(cache, self.prefill(cache, prompts), prompts)

    @torch.no_grad()
    def plain_logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """Plain logits of the questions' rows, `[batch, rows, vocabulary]`."""
        ids = torch.tensor([prompts[0].ids], device=input_device(self.model))
        logits: Tensor = self.model(ids, use_cache=False).logits[:, -question_rows(prompts) :].float()
        return logits

    def compare_with_plain(self, got: BlendedPrefill) -> CheckResult:
        """Compare logits of the questions' rows with the plain model's."""
        expected = self.plain_logits(got.prompts)
        allowed = allowed_of(LOGITS, self.model.dtype)
        error = norm_error(got.logits, expected)
        if error > allowed:
            ids = torch.tensor([got.prompts[0].ids], device=input_device(self.model))
            allowed = max(allowed, min(MOST_ALLOWED, FLOORS * plain_noise(self.model, ids, expected.shape[1])))
        size = f"off by {error:.2g} of their size in {str(self.model.dtype).removeprefix('torch.')}"
        return CheckResult(error, allowed, f"its logits are {size}, where {self.allowance(allowed)}")

    def allowance(self, allowed: float) -> str:
        """Say what is allowed; of a quantised model also why it is so much."""
        if not is_quantised(self.model):
            return f"{allowed:.2g} is allowed."
        return f"{allowed:.2g} is allowed: its quantisation makes plain prefills of one prompt differ, too."

    def compare(self, compared: Sequence[Comparison], plain: str) -> CheckResult:
        """Compare tensors with those of a plain forward, `plain` says which: all in the dtype of K and V."""
        dtype = self.model.dtype if compared[0].layer is None else compared[0].expected.dtype
        allowed, worst = MOST_ALLOWED if is_quantised(self.model) else allowed_of(KV, dtype), 0.0
        for comparison in compared:
            is_shaped = comparison.got.shape == comparison.expected.shape
            error = (
                relative_error(comparison.got.to(dtype), comparison.expected.to(dtype)) if is_shaped else float("inf")
            )
            if not error <= allowed:
                off = f"{comparison.name} are off by {error:.2g} of their size from a plain forward {plain}"
                return CheckResult(error, allowed, f"{off}, where {self.allowance(allowed)}")
            worst = max(worst, error)
        return CheckResult(worst, allowed)

    def contribution_tolerance(self, dtype: torch.dtype) -> float:
        """What rounding does to what an attention layer adds, as a share of its size."""
        return {torch.float64: 1e-8, torch.float32: 5e-5}.get(dtype, 5 * torch.finfo(dtype).eps)


@torch.no_grad()
def plain_noise(model: nn.Module, ids: Tensor, rows: int) -> float:
    """How far the plain model's logits of a prompt's last rows are from themselves when it is run in two pieces.

    Of a quantised model also when more tokens follow: LLM.int8() picks outlier columns over all rows of a product.
    """
    expected = model(ids, use_cache=False).logits[:, -rows:].float()
    cache = full_cache(model)
    halves = []
    for half in ids.tensor_split(2, dim=1):
        halves.append(model(half, **cache_argument(model, cache), use_cache=True).logits)
    noise = norm_error(torch.cat(halves, dim=1)[:, -rows:].float(), expected)
    if is_quantised(model):
        width = ids.shape[1]
        longer = model(torch.cat([ids, ids], dim=1), use_cache=False).logits[:, width - rows : width]
        noise = max(noise, norm_error(longer.float(), expected))
    return noise


def verdict_of(model: nn.Module, use: Use) -> tuple[str, bool] | None:
    """The verdict on a use of a model as it is now, `PASSED` where nothing is wrong; None: it was not tested."""
    return _complaints.get(model, {}).get(_state(model, use))


def set_passed(model: nn.Module, use: Use) -> None:
    """Take over that a model as it is now has passed the checks of a use."""
    _complaints.setdefault(model, {})[_state(model, use)] = PASSED


def ensure_passed(subject: CheckedModel, use: Use, allow_unverified: bool = False) -> None:
    """Run the checks of a use once for each dtype and attention that a model has."""
    model = subject.model
    with PROBING:
        if use.name in _testing.get(model, ()):
            return
        complaints = _complaints.setdefault(model, {})
        state = _state(model, use, subject.kind)
        if state not in complaints:
            _testing.setdefault(model, set()).add(use.name)
            try:
                with canonical(model), notes_kept(model):
                    verdict = _complaint(subject, use)
            finally:
                _testing[model].discard(use.name)
            if verdict is None:
                return
            complaints[state] = verdict
        complaint, overridable = complaints[state]
        if complaint and not (allow_unverified and overridable):
            raise UnsupportedModelError(complaint)
        if complaint and use.name not in _warned.setdefault(model, set()):
            _warned[model].add(use.name)
            logger.warning("the model is used without being verified (allow_unverified): %s", complaint)


def _state(model: nn.Module, use: Use, kind: Any = ()) -> tuple[Any, ...]:
    attention = getattr(text_config(model), "_attn_implementation", None)
    return use.name, kind, model.dtype, attention, is_extended(model), structure_of(model)


def _complaint(subject: CheckedModel, use: Use) -> tuple[str, bool] | None:
    """Why a model must not be used so ("" if nothing is wrong), and whether `allow_unverified` overrides it.

    None: nothing could be tried.
    """
    importlib.import_module(use.module)  # an extension registers its checks when it is imported
    what = use.refusal.format(subject.name)
    for trial in [check for check in CHECKS.values() if check.first_use == use.name]:
        try:
            result = trial.measure(subject)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as broken:
            return f"{what}: the self-test ended in {type(broken).__name__}: {broken} {use.do}", trial.overridable
        if result is None:
            return None
        if not result.passed:
            return f"{what}: {result.detail} {use.do}" if trial.overridable else result.detail, trial.overridable
    return PASSED


def question_rows(prompts: Sequence[Prompt]) -> int:
    """Tokens of the shortest question."""
    return min(len(prompt.question) for prompt in prompts)


def kv_of(cache: Any) -> list[States]:
    """(K, V) of each layer of a cache, `[batch, kv_heads, tokens, head_dim]`, not copied; () where it has none."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return [() if key is None else (key, layer.values) for key, layer in zip(keys, cache.layers, strict=True)]


def allowed_of(bounds: tuple[float, float, float], dtype: torch.dtype) -> float:
    """What an error may be in a dtype: of float64, float32, or coarser ones and quantised products."""
    return bounds[FINE.index(dtype) if dtype in FINE else -1]


def norm_error(got: Tensor, expected: Tensor) -> float:
    """Norm of a difference over that of what is expected (Frobenius); NaN and other shapes are infinite."""
    if got.shape != expected.shape:
        return float("inf")
    size = torch.linalg.vector_norm(expected.float()).clamp_min(torch.finfo(torch.float32).tiny)
    share = float(torch.linalg.vector_norm(got.float() - expected.float()) / size)
    return share if share == share else float("inf")


def token_errors(got: Tensor, expected: Tensor) -> Tensor:
    """Norm of each token's difference `[tokens, width]` over the usual norm of a token; NaN is infinite."""
    errors, sizes = (torch.linalg.vector_norm(tensor.float(), dim=1) for tensor in (got - expected, expected))
    scale = sizes.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return (errors / scale).nan_to_num(float("inf"), float("inf"))


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference of two tensors `[…, tokens, width]`, over the largest size of the second.

    In 16 bits the median over the tokens: there a token may be sent to another expert for a rounding error, while a
    wrong style shows at every token.
    """
    scale = expected.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    by_token = (got.float() - expected.float()).abs().movedim(-2, 0).flatten(1).amax(dim=1) / scale
    return float(by_token.amax() if expected.dtype in FINE else by_token.median())
