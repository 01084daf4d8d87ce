# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Trust in a model is earned once: its layers are calibrated, then it is blended in the small, next to itself.

The self-test is the rung that sees most: ratio 1.0 through the sparse path against a plain forward, 24 random tokens
with two chunks. A mask, a position or a cache that a family treats in its own way shows there as a large error; noise
stays below the bound of the dtype, or near what the model does to itself when it is run in two pieces.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import HfBlendError, UnsupportedModelError
from ..rotary.base import RotaryStyle
from .anatomy import PER_TOKEN, full_cache, is_extended, text_config
from .calibrate import rotary_styles
from .fingerprint import structure_digest
from .identity.canonical import canonical
from .modality import placeholder_ids
from .placement import input_device
from .quantised import shared_scale

__all__ = ["FAILURES", "FLOORS", "ensure_passed", "ensure_trusted"]

logger = logging.getLogger(__name__)

PREFIX_TOKENS, CHUNK_TOKENS, QUESTION_TOKENS = 2, 8, 6
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-3}  # share of the logits' size; what is wrong is off by about 0.3
COARSE_BOUND = 0.05  # bfloat16 and float16, and models whose matrix products are quantised
FLOORS = 4.0  # one comparison of two plain forwards is a small sample of the noise, so this many of it are allowed
MOST_ALLOWED = 0.2  # a plain model that is further from itself in two pieces says nothing about noise
FAILURES = (ArithmeticError, AttributeError, HfBlendError, LookupError, RuntimeError, TypeError, ValueError)

_complaints: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str]] = WeakKeyDictionary()  # "": none
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_testing: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_lock = threading.RLock()


def ensure_trusted(
    model: nn.Module, make_cache: Callable[..., Any], allow_unverified: bool = False, digest: str = ""
) -> tuple[type[RotaryStyle], ...]:
    """Find out whether a model can be blended exactly, once for each dtype, attention and structure that it has."""
    with _lock:
        digest = digest or structure_digest(model)
        styles = rotary_styles(model, digest)
        ensure_passed(model, "blend", lambda: _tested(model, make_cache), allow_unverified, digest)
    return styles


def ensure_passed(
    model: nn.Module, use: str, test: Callable[[], str], allow_unverified: bool = False, digest: str = ""
) -> None:
    """Run a self-test once for each dtype and attention that a model is used with."""
    with _lock:
        if use in _testing.get(model, ()):
            return
        complaint = _complaint(model, use, test, digest or structure_digest(model))
        if complaint and not allow_unverified:
            raise UnsupportedModelError(complaint)
        if complaint and use not in _warned.setdefault(model, set()):
            _warned[model].add(use)
            logger.warning("the model is used without being verified (allow_unverified): %s", complaint)


def _complaint(model: nn.Module, use: str, test: Callable[[], str], digest: str) -> str:
    """What speaks against the model as it is now; empty if nothing does."""
    known = _complaints.setdefault(model, {})
    attention = getattr(text_config(model), "_attn_implementation", None)
    state = (use, model.dtype, attention, is_extended(model), digest)
    if state not in known:
        _testing.setdefault(model, set()).add(use)
        try:
            with canonical(model):
                known[state] = test()
        finally:
            _testing[model].discard(use)
    return known[state]


def _tested(model: nn.Module, make_cache: Callable[..., Any]) -> str:
    name = type(model).__name__
    do = (
        "Use full prefill for this model, or pass allow_unverified=True to blend it all the same; run hf-blend verify."
    )
    if cause := shared_scale(model):
        return f"{name} cannot be blended exactly: {cause} {do}"
    try:
        ahead = _sees_ahead(model)
        bound = BOUNDS.get(model.dtype, COARSE_BOUND)
        sees_ahead = bound < ahead < float("inf")
        error, allowed = (0.0, 0.0) if sees_ahead else _compare(model, make_cache)
    except FAILURES as broken:
        return (
            f"{name} cannot be blended: the self-test ended in {type(broken).__name__}: {broken} Wanted were the "
            f"logits of a plain forward. {do}"
        )
    if sees_ahead:
        return (
            f"{name} cannot be blended: its tokens see those behind them. Another last token moves the logits of the "
            f"others by {ahead:.2g} of their size, where at most {bound:.2g} is expected. {do}"
        )
    if error <= allowed:
        return ""
    return (
        f"{name} cannot be blended exactly: with every token recomputed its logits are off by {error:.2g} of their "
        f"size in {str(model.dtype).removeprefix('torch.')}, where {allowed:.2g} is allowed. {do}"
    )


def _compare(model: nn.Module, make_cache: Callable[..., Any]) -> tuple[float, float]:
    """The error of a blended forward, and what is allowed; shares of the logits' size."""
    pieces, device = _pieces(model), input_device(model)
    cache = make_cache(model, recompute_ratio=1.0, chunk_prefix_ids=())
    inputs = cache.inputs(None, prefix=pieces[0], chunks=pieces[1:3], question=pieces[3])
    ids = inputs["input_ids"].to(device)
    wanted = model(ids, use_cache=False).logits[:, -QUESTION_TOKENS:]
    few = {name: False for name in PER_TOKEN if getattr(text_config(model), name, False)}
    got = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=QUESTION_TOKENS, **few).logits
    if cache.report.fallback_reason:
        raise UnsupportedModelError(f"nothing was reused: {cache.report.fallback_reason}")
    bound = BOUNDS.get(model.dtype, COARSE_BOUND)
    error = _share(got, wanted)
    if error <= bound:
        return error, bound
    return error, max(bound, min(MOST_ALLOWED, FLOORS * _floor(model, ids, wanted)))


@torch.no_grad()
def _sees_ahead(model: nn.Module) -> float:
    """How far the logits of some tokens move with the token behind them, as a share of their size."""
    ids = torch.tensor([[token for piece in _pieces(model) for token in piece]], device=input_device(model))
    pair = ids, torch.cat((ids[:, :-1], ids[:, :1]), dim=1)
    before, after = (model(one, use_cache=False).logits[:, :-1] for one in pair)
    return _share(after, before)


def _floor(model: nn.Module, ids: Tensor, wanted: Tensor) -> float:
    """How far the plain model is from itself when it is run in two pieces."""
    cache, half = full_cache(model), ids.shape[1] // 2
    parts = [model(part, past_key_values=cache, use_cache=True).logits for part in (ids[:, :half], ids[:, half:])]
    return _share(torch.cat(parts, dim=1)[:, -QUESTION_TOKENS:], wanted)


def _pieces(model: nn.Module) -> list[list[int]]:
    """Random prefix, two chunks and question, as token ids; text only."""
    placeholders, vocabulary = placeholder_ids(model.config), text_config(model).vocab_size
    text = [token for token in range(vocabulary) if token not in placeholders] if placeholders else range(vocabulary)
    lengths = (PREFIX_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS, QUESTION_TOKENS)
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(len(text), (count,), generator=generator).tolist() for count in lengths]
    return [[text[place] for place in draw] for draw in draws]


def _share(got: Tensor, wanted: Tensor) -> float:
    """Size of a difference over the size of what is wanted (Frobenius norms); NaN and other shapes are infinite."""
    if got.shape != wanted.shape:
        return float("inf")
    share = float(torch.linalg.vector_norm((got - wanted).float()) / torch.linalg.vector_norm(wanted.float()))
    return share if share == share else float("inf")
