# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks: claims about a model, each measured on it; some before the model is first used, all by `hf-blend verify`.

A check is a function that measures an error and says what is allowed, and where that comes from: 0 where the claim is
about bits, else a measured floor or a count of roundings. It must be able to fail: where a claim could hold because
nothing happened, it checks that something did.

A check with a `first_use` is run once, on one short prompt, before a model is used so. What is wrong (a mask, a
position or a cache that a family treats in its own way) shows there as a large error; noise stays below the bound of
the dtype, or near what the model does to itself when it is run in two pieces.
"""

import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import HfBlendError, UnsupportedModelError
from ..prompt.pieces import Prompt
from ..rotary.base import RotaryStyle
from .anatomy import PER_TOKEN, full_cache, is_extended, text_config
from .calibrate import COARSE_TOLERANCE, TOLERANCE, relative_error, rotary_styles
from .fingerprint import structure_digest
from .identity.canonical import canonical
from .modality import text_ids
from .placement import input_device
from .quantised import shared_scale

logger = logging.getLogger(__name__)

LENGTHS = (2, 8, 8, 6)  # tokens of the prefix, the chunks and the question of the prompt at first use
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}  # share of the logits' size; what is wrong is off by about 0.3
COARSE_BOUND = 0.05  # bfloat16 and float16, and models whose matrix products are quantised
FLOORS = 4.0  # one comparison of two plain forwards is a small sample of the noise, so this many of it are allowed
MOST_ALLOWED = 0.2  # a plain model that is further from itself in two pieces says nothing about noise
FAILURES = (ArithmeticError, AttributeError, HfBlendError, LookupError, RuntimeError, TypeError, ValueError)
States = tuple[Tensor, ...]  # (K, V) of a layer, or () where it keeps none


@dataclass(frozen=True)
class CheckResult:
    """The largest error of a check and what is allowed; `refused`: the model is refused what the claim is about."""

    error: float
    tolerance: float
    detail: str = ""
    refused: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether the claim holds; an error that is not a number does not. None: nothing is claimed of this model."""
        return None if self.refused else self.error <= self.tolerance


@dataclass(frozen=True)
class Check:
    """A claim about a model, and the function that measures it."""

    name: str
    claim: str
    measure: Callable[[Any], CheckResult]
    first_use: str = ""
    overridable: bool = True


@dataclass(frozen=True)
class Use:
    """A way to use a model: the module that has its checks, and what is said where one of them fails."""

    name: str
    module: str
    refusal: str
    do: str


BLEND = Use(
    "blend",
    __name__,
    "{} cannot be blended",
    "Use full prefill for this model, or pass allow_unverified=True to blend it all the same; run hf-blend verify.",
)
CHECKS: dict[str, Check] = {}
_complaints: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], tuple[str, bool]]] = WeakKeyDictionary()  # "": none
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_testing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_lock = threading.RLock()


def check(first_use: str = "", overridable: bool = True) -> Callable[[Callable[[Any], CheckResult]], Any]:
    """Register a function as a check under its own name; the first line of its docstring is the claim."""

    def register(measure: Callable[[Any], CheckResult]) -> Callable[[Any], CheckResult]:
        name, claim = measure.__name__, (measure.__doc__ or "").partition("\n")[0]
        CHECKS[name] = Check(name, claim, measure, first_use, overridable)
        return measure

    return register


def violations(found: list[str]) -> CheckResult:
    """Count the things that are wrong, of which none is allowed."""
    return CheckResult(float(len(found)), 0.0, "; ".join(found[:3]))


def nothing_shown(why: str) -> CheckResult:
    """Fail a check under which nothing happened that could have been wrong."""
    return CheckResult(float("inf"), 0.0, why)


def refused(error: object) -> CheckResult:
    """Neither hold nor fail: the model is refused what the claim is about, before anything wrong is done."""
    return CheckResult(float("inf"), 0.0, str(error), refused=True)


@dataclass(frozen=True)
class Comparison:
    """One tensor beside what it must equal; `layer` is None for logits."""

    name: str
    got: Tensor
    expected: Tensor
    layer: int | None = None


@dataclass
class Blended:
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

    def __init__(self, model: nn.Module, make_cache: Callable[..., Any] | None = None) -> None:
        """Prepare; `make_cache(model, **settings)` gives a cache on an empty store."""
        self.model = model
        self._make_cache: Any = make_cache

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Random prefix, two chunks and question; text only."""
        prefix, *chunks, question = (self.ids(count, seed) for seed, count in enumerate(LENGTHS))
        return [Prompt(prefix, tuple(chunks), question)]

    def ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Random tokens of text."""
        return tuple(text_ids(self.model, count, seed).tolist())

    def cache(self, ratio: float, store: Any = None, **settings: Any) -> Any:
        """A cache for a request."""
        return self._make_cache(self.model, recompute_ratio=ratio, chunk_prefix_ids=(), **settings)

    def inputs(self, cache: Any, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Announce prompts to a cache, and give what the model is called with."""
        pieces: dict[str, Any] = {"prefix": [p.prefix for p in prompts], "chunks": [p.chunks for p in prompts]}
        inputs: dict[str, Tensor] = cache.inputs(None, **pieces, question=[p.question for p in prompts])
        return inputs

    @torch.no_grad()
    def forward(self, cache: Any, inputs: dict[str, Tensor], rows: int) -> Tensor:
        """One forward with a cache, entered as `generate` enters: logits of the last rows, float32."""
        few = {name: False for name in PER_TOKEN if getattr(text_config(self.model), name, False)}
        output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=rows, **few)
        logits: Tensor = output.logits.float()
        return logits

    def prefill(self, cache: Any, prompts: Sequence[Prompt]) -> Tensor:
        """Prefill prompts with a cache: logits of the questions' rows."""
        return self.forward(cache, self.inputs(cache, prompts), question_rows(prompts))

    def blend(self, prompts: Sequence[Prompt], ratio: float, store: Any = None, **settings: Any) -> Blended:
        """Prefill prompts with stored chunks."""
        cache = self.cache(ratio, store, **settings)
        return Blended(cache, self.prefill(cache, prompts), prompts)

    @torch.no_grad()
    def plain_logits(self, prompts: Sequence[Prompt]) -> Tensor:
        """Plain logits of the questions' rows, `[batch, rows, vocabulary]`."""
        ids = torch.tensor([prompts[0].ids], device=input_device(self.model))
        logits: Tensor = self.model(ids, use_cache=False).logits[:, -question_rows(prompts) :].float()
        return logits

    def compare_with_plain(self, prompts: Sequence[Prompt], got: Tensor) -> CheckResult:
        """Compare logits of the questions' rows with the plain model's."""
        expected, bound = self.plain_logits(prompts), BOUNDS.get(self.model.dtype, COARSE_BOUND)
        error, allowed = norm_error(got, expected), bound
        if error > bound:
            allowed = max(bound, min(MOST_ALLOWED, FLOORS * self._floor(prompts, expected)))
        size = f"off by {error:.2g} of their size in {str(self.model.dtype).removeprefix('torch.')}"
        return CheckResult(error, allowed, f"its logits are {size}, where {allowed:.2g} is allowed.")

    def compare(self, compared: Sequence[Comparison], plain: str) -> CheckResult:
        """Compare tensors with those of a plain forward, `plain` says which: all in the dtype of K and V."""
        dtype = self.model.dtype if compared[0].layer is None else compared[0].expected.dtype
        allowed, worst = TOLERANCE.get(dtype, COARSE_TOLERANCE), 0.0
        for one in compared:
            is_shaped = one.got.shape == one.expected.shape
            error = relative_error(one.got.to(dtype), one.expected.to(dtype)) if is_shaped else float("inf")
            if not error <= allowed:
                off = f"{one.name} are off by {error:.2g} of their size from a plain forward {plain}"
                return CheckResult(error, allowed, f"{off}, where {allowed:.2g} is allowed.")
            worst = max(worst, error)
        return CheckResult(worst, allowed)

    def contribution_tolerance(self, dtype: torch.dtype) -> float:
        """What rounding does to what an attention layer adds, as a share of its size."""
        return {torch.float64: 1e-8, torch.float32: 5e-5}.get(dtype, 5 * torch.finfo(dtype).eps)

    @torch.no_grad()
    def _floor(self, prompts: Sequence[Prompt], expected: Tensor) -> float:
        """How far the plain model is from itself when it is run in two pieces."""
        ids, cache = torch.tensor([prompts[0].ids], device=input_device(self.model)), full_cache(self.model)
        halves = ids.tensor_split(2, dim=1)
        logits = torch.cat([self.model(part, past_key_values=cache, use_cache=True).logits for part in halves], dim=1)
        return norm_error(logits[:, -expected.shape[1] :].float(), expected)


def ensure_trusted(
    model: nn.Module, make_cache: Callable[..., Any], allow_unverified: bool = False, digest: str = ""
) -> tuple[type[RotaryStyle], ...]:
    """Find out whether a model can be blended exactly, once for each dtype, attention and structure that it has."""
    with _lock:
        digest = digest or structure_digest(model)
        styles = rotary_styles(model, digest)
        ensure_passed(CheckedModel(model, make_cache), BLEND, allow_unverified, digest)
    return styles


def ensure_passed(subject: CheckedModel, use: Use, allow_unverified: bool = False, digest: str = "") -> None:
    """Run the checks of a use once for each dtype and attention that a model has."""
    model = subject.model
    with _lock:
        if use.name in _testing.get(model, ()):
            return
        attention = getattr(text_config(model), "_attn_implementation", None)
        known = _complaints.setdefault(model, {})
        state = (use.name, model.dtype, attention, is_extended(model), digest or structure_digest(model))
        if state not in known:
            _testing.setdefault(model, set()).add(use.name)
            try:
                with canonical(model):
                    known[state] = _complaint(subject, use)
            finally:
                _testing[model].discard(use.name)
        complaint, overridable = known[state]
        if complaint and not (allow_unverified and overridable):
            raise UnsupportedModelError(complaint)
        if complaint and use.name not in _warned.setdefault(model, set()):
            _warned[model].add(use.name)
            logger.warning("the model is used without being verified (allow_unverified): %s", complaint)


def _complaint(subject: CheckedModel, use: Use) -> tuple[str, bool]:
    """What speaks against a use of a model, and whether the caller may use it all the same; "" if nothing does."""
    importlib.import_module(use.module)  # a room registers its checks when it is imported
    what = use.refusal.format(type(subject.model).__name__)
    for one in [check for check in CHECKS.values() if check.first_use == use.name]:
        try:
            result = one.measure(subject)
        except FAILURES as broken:
            return f"{what}: the self-test ended in {type(broken).__name__}: {broken} {use.do}", one.overridable
        if not result.passed:
            return f"{what}: {result.detail} {use.do}" if one.overridable else result.detail, one.overridable
    return "", True


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
    ids = torch.tensor([subject.prompts[0].ids], device=input_device(subject.model))
    pair = ids, torch.cat((ids[:, :-1], ids[:, :1]), dim=1)
    before, after = (subject.model(one, use_cache=False).logits[:, :-1] for one in pair)
    ahead, bound = norm_error(after, before), BOUNDS.get(subject.model.dtype, COARSE_BOUND)
    detail = (
        "its tokens see those behind them. Another last token moves the logits of the others by "
        f"{ahead:.2g} of their size, where at most {bound:.2g} is expected."
    )
    return CheckResult(ahead, bound, detail) if bound < ahead < float("inf") else CheckResult(0.0, bound)


@check(first_use="blend")
def ratio_1(subject: CheckedModel) -> CheckResult:
    """Ratio 1.0 through the sparse path gives the logits of a full prefill, for each request alone.

    The prefix is reused, every chunk token is recomputed as a chosen one.
    """
    results = []
    for prompt in subject.prompts:
        got = subject.blend([prompt], 1.0)
        report = got.cache.report
        if not report.reusable_tokens or report.reusable_tokens != sum(map(len, report.chosen_columns)):
            return nothing_shown(f"the sparse path was not taken: {report.fallback_reason or report}")
        results.append(subject.compare_with_plain([prompt], got.logits))
    worst = max(results, key=lambda one: (not one.passed, one.error))
    return CheckResult(worst.error, worst.tolerance, worst.detail and f"with every token recomputed {worst.detail}")


def question_rows(prompts: Sequence[Prompt]) -> int:
    """Tokens of the shortest question."""
    return min(len(prompt.question) for prompt in prompts)


def kv_of(cache: Any) -> list[States]:
    """(K, V) of each layer of a cache, `[batch, kv_heads, tokens, head_dim]`, not copied; () where it has none."""
    keys = [getattr(layer, "keys", None) for layer in cache.layers]
    return [() if one is None else (one, layer.values) for one, layer in zip(keys, cache.layers, strict=True)]


def norm_error(got: Tensor, expected: Tensor) -> float:
    """Norm of a difference over that of what is expected (Frobenius); NaN and other shapes are infinite."""
    if got.shape != expected.shape:
        return float("inf")
    size = torch.linalg.vector_norm(expected.float()).clamp_min(torch.finfo(torch.float32).tiny)
    share = float(torch.linalg.vector_norm(got.float() - expected.float()) / size)
    return share if share == share else float("inf")
