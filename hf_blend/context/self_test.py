# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a model's keys can be moved in a cache, and its far tokens grouped: found out once, before either is done.

The oracles compare with the stock model; what fails is refused by the name of its layer. As for blending, a model is
tested once in each dtype and with each attention.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import decoder_layers, text_config
from ..model.calibrate import COARSE_TOLERANCE, TOLERANCE, relative_error
from ..model.placement import input_device
from ..model.trust import FAILURES, FLOORS, ensure_passed
from .oracles import Comparison, FarRow, closed_hole, far_rows, shared_cells, whole_shift

if TYPE_CHECKING:
    from .sequence_cache import SequenceCache

HELD_TOKENS, MORE_TOKENS = 14, 4
SHIFT = 37  # positions, not a multiple of a head's width
HOLE = (5, 9)  # tokens
SHARED_TOKENS, SHARED_LENGTHS = 10, (10, 7, 10)  # held by one sequence, and what three copies of it keep
EXTEND_BOUNDS = {torch.float64: 1e-8, torch.float32: 5e-5}  # what is wrong is off by 1e-3 to 1
ROUNDINGS = 5  # in 16 bits: queries and keys are rotated twice, scores, weights and output are rounded
DO = "Use a fresh prefill instead, or pass allow_unverified=True to use it all the same."


def ensure_movable(
    model: nn.Module, make_cache: Callable[[], "SequenceCache"], allow_unverified: bool = False
) -> None:
    """Find out whether a sequence of a model can be moved in its cache."""
    ensure_passed(model, "move", lambda: _moving(model, make_cache()), allow_unverified)


def ensure_shareable(
    model: nn.Module, make_cache: Callable[[], "SequenceCache"], allow_unverified: bool = False
) -> None:
    """Find out whether several sequences of a model can look at one storage, each seeing its own cells."""
    ensure_passed(model, "share", lambda: _sharing(model, make_cache()), allow_unverified)


def ensure_extendable(
    model: nn.Module,
    block: Callable[[], AbstractContextManager[Any]],
    asked: set[int],
    allow_unverified: bool = False,
) -> None:
    """Find out whether far tokens of a model can be grouped."""
    ensure_passed(model, "ask", lambda: _asking(model, block, asked))
    ensure_passed(model, "extend", lambda: _extending(model, block), allow_unverified)


def _moving(model: nn.Module, cache: "SequenceCache") -> str:
    """What speaks against moving sequences; empty if nothing does."""
    ids, what = _ids(model), f"a sequence that {type(model).__name__} computed cannot be moved"
    try:
        found = _off(whole_shift(model, cache, ids, HELD_TOKENS, SHIFT)) or _off(closed_hole(model, cache, ids, *HOLE))
    except FAILURES as broken:
        return f"{what}: the self-test ended in {type(broken).__name__}: {broken} {DO}"
    return f"{what}: {found} {DO}" if found else ""


def _sharing(model: nn.Module, cache: "SequenceCache") -> str:
    """What speaks against several sequences over one storage; empty if nothing does."""
    what = f"several sequences of {type(model).__name__} cannot share cells"
    try:
        found = _off(
            shared_cells(model, cache, _ids(model), SHARED_TOKENS, SHARED_LENGTHS), "of the same tokens alone"
        )
    except FAILURES as broken:
        return f"{what}: the self-test ended in {type(broken).__name__}: {broken} Continue one at a time with use()."
    return f"{what}: {found} Continue one at a time with use()." if found else ""


def _off(compared: Sequence[Comparison], plain: str = "at the new positions") -> str:
    """The first tensor that is not what it must equal, in words; all are compared in the dtype of K and V."""
    dtype = compared[0].expected.dtype
    allowed = TOLERANCE.get(dtype, COARSE_TOLERANCE)
    for one in compared:
        same = one.got.shape == one.expected.shape
        error = relative_error(one.got.to(dtype), one.expected.to(dtype)) if same else float("inf")
        if not error <= allowed:
            return (
                f"{one.name} are off by {error:.2g} of their size from a plain forward {plain}, where "
                f"{allowed:.2g} is allowed."
            )
    return ""


def _asking(model: nn.Module, block: Callable[[], AbstractContextManager[Any]], asked: set[int]) -> str:
    """The first layer that does not ask transformers for its attention; empty if all do."""
    try:
        with torch.no_grad(), block():
            model(_ids(model).to(input_device(model)), use_cache=False)
    except UnsupportedModelError as refused:
        return str(refused)
    except FAILURES as broken:
        return f"layer {len(asked)} of {type(model).__name__} cannot be extended: {type(broken).__name__}: {broken}"
    deaf = [index for index in range(len(decoder_layers(model))) if index not in asked]
    if not deaf:
        return ""
    return (
        f"layer {deaf[0]} of {type(model).__name__} computes its attention without asking for it by transformers' "
        "AttentionInterface, so Self-Extend would change nothing in it. Use a model whose layers all ask, or a "
        "shorter prompt."
    )


def _extending(model: nn.Module, block: Callable[[], AbstractContextManager[Any]]) -> str:
    """What speaks against grouping far tokens; empty if nothing does."""
    name = type(model).__name__
    try:
        rows = far_rows(model, _ids(model), block)
    except FAILURES as broken:
        return f"{name} cannot be extended: the self-test ended in {type(broken).__name__}: {broken} {DO}"
    for row in rows:
        error, allowed = relative_error(row.got, row.expected), _allowed(row)
        if not error <= allowed:
            return (
                f"layer {row.layer} of {name} cannot be extended: with all other tokens at distance 1 its output is "
                f"off by {error:.2g} of its size from the stock layer's, where {allowed:.2g} is allowed. {DO}"
            )
    return ""


def _allowed(row: FarRow) -> float:
    """What rounding does to a layer's output, as a share of its size: as measured, and never less than a few bits."""
    dtype = row.expected.dtype
    least = EXTEND_BOUNDS.get(dtype, ROUNDINGS * torch.finfo(dtype).eps)
    return max(FLOORS * relative_error(row.again, row.plain), least)


def _ids(model: nn.Module) -> Tensor:
    tokens = HELD_TOKENS + MORE_TOKENS
    return torch.randint(text_config(model).vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
