# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every model type of the installed transformers: blended, moved and extended exactly, or refused with a reason.

A type of which no tiny model can be built is neither: it is not judged, and counted apart. Run by `hf-blend verify
--all` in a source checkout; benchmarks/results/families.json is its committed record.
"""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from hf_blend import BlendCache, ChunkStore, UnsupportedModelError
from hf_blend.model.anatomy import text_config
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.checks import FAILURES
from hf_blend.model_names import TINY, from_checkout, load_model
from hf_blend.verify.model_under_test import (
    PIECES,
    ModelUnderTest,
    attending,
    distance,
    in_pieces,
    prefill,
)
from hf_blend.verify.runner import Verdict, verify

models = from_checkout("tiny_models")
NOT_JUDGED = models.NOT_JUDGED
tiny_types = models.tiny_types

CHECKS = ("moved_chunk", "ratio_1", "fused_ratio", "untouched")
MOVE = ("whole_shift", "closed_hole")
EXTEND = ("self_extend",)
HEAL = ("heal",)
VERDICTS = ("reason", "move", "extend", "heal", "heal_bfloat16")  # what a row says, None or "exact" or why not
MEASURED = ("ratio_1", "fused_ratio")  # checks whose error is one of logits
DTYPE = "float32"
EXACT = "exact"
BROKEN = ("crashed: ", "wrong: ")  # how a verdict begins that is neither exact nor a refusal


def verify_types(
    types: Iterable[str] | None = None, attention: tuple[str, ...] = ("sdpa", "eager")
) -> Iterator[dict[str, Any]]:
    """Run the checks that tell right from wrong on a tiny random model of each type."""
    for model_type in tiny_types() if types is None else types:
        started = time.perf_counter()
        row = {"model": model_type, **_row(model_type, attention)}
        yield {**row, "seconds": round(time.perf_counter() - started, 1)}


def broken(row: dict[str, Any]) -> bool:
    """Whether a row says of anything that it crashed or is wrong without a refusal."""
    return any(str(row.get(name) or "").startswith(BROKEN) for name in VERDICTS)


def judged(row: dict[str, Any]) -> bool:
    """Whether there was a tiny model of a row's type to try, or its config told enough."""
    return not str(row["reason"] or "").startswith(NOT_JUDGED)


def _row(model_type: str, attention: tuple[str, ...]) -> dict[str, Any]:
    loaded: list[nn.Module] = []

    def load(*how: Any) -> nn.Module:
        loaded.append(load_model(*how))
        return loaded[-1]

    checks = (*CHECKS, *MOVE, *EXTEND, *HEAL)
    try:
        verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[:1], checks=checks, load=load)
        if not verdict.checks and verdict.refusal is None:
            verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[1:], checks=checks, load=load)
    except (*FAILURES, AssertionError, ImportError, OSError) as error:
        verdict = Verdict(model_type, refusal=f"crashed: {type(error).__name__}: {error}")
    blend, move, extend, heal = (_part(verdict, names) for names in (CHECKS, MOVE, EXTEND, HEAL))
    styled = blend.supported and loaded
    return {
        "supported": blend.supported,
        "reason": _refusal(blend, loaded),
        "max_abs_error": _largest(blend, MEASURED),
        "move": _verdict(move),
        "move_error": _largest(move, MOVE[:1]),
        "extend": _verdict(extend),
        "extend_error": _largest(extend, EXTEND),
        "heal": _verdict(heal),
        "heal_error": _largest(heal, HEAL),
        **(healed_in_bfloat16(model_type, attention) if styled else {"heal_bfloat16": _verdict(heal)}),
        "rotary": _rotary(loaded[-1]) if styled else "",
        "window": _window(loaded[-1]) if styled else "",
    }


def healed_in_bfloat16(model_type: str, attention: tuple[str, ...] = ("sdpa", "eager")) -> dict[str, Any]:
    """Whether a healed cache in bfloat16 is as near to stock's prefill as stock's own prefill in 2, 3 and 7 pieces."""
    loaded: list[nn.Module] = []

    def load(*how: Any) -> nn.Module:
        loaded.append(load_model(*how))
        return loaded[-1]

    verdict = Verdict(model_type)
    used = attention[0]
    for used in attention:
        verdict = verify(TINY + model_type, dtypes=["bfloat16"], attention=[used], checks=HEAL, load=load)
        if verdict.checks or verdict.refusal is not None:
            break
    error = _largest(verdict, HEAL)
    floor = None
    said = _verdict(verdict)
    if error is not None:
        with attending(loaded[-1], used):
            floor = _floor_of_pieces(loaded[-1])
        said = EXACT if error <= floor else f"wrong: the error is {error:.2g}, stock's own in pieces is {floor:.2g}"
    return {"heal_bfloat16": said, "heal_bfloat16_error": error, "heal_bfloat16_floor": floor}


def _floor_of_pieces(model: nn.Module) -> float:
    """How far logits of stock's prefills in pieces are from those of one in a piece."""
    prompts = ModelUnderTest(model).prompts
    whole = [prefill(model, [prompt])[0] for prompt in prompts]
    pairs = (pair for count in PIECES for pair in zip(whole, in_pieces(model, prompts, count), strict=True))
    return max(distance(run.logits, other.logits) for run, other in pairs)


def _part(verdict: Verdict, names: tuple[str, ...]) -> Verdict:
    return replace(verdict, checks=[one for one in verdict.checks if one.name in names])


def _refusal(blend: Verdict, loaded: list[nn.Module]) -> str | None:
    """Why a type is not blended: its refusal, or that of its self-test where checks fail."""
    if not blend.failed or blend.refusal is not None:
        return blend.reason
    try:
        BlendCache(loaded[-1], ChunkStore.open("memory://"))
    except UnsupportedModelError as error:
        return str(error)
    return f"wrong: {blend.reason}"


def _verdict(part: Verdict) -> str:
    """Either "exact", or why not; the self-test has been passed where a check was measured."""
    if part.refusal is not None:
        return part.refusal
    if part.failed:
        return f"wrong: {part.reason}"
    return part.refused[0].detail if part.refused else EXACT


def _largest(part: Verdict, names: tuple[str, ...]) -> float | None:
    """The largest error of some checks; None unless all were measured."""
    errors = [one.max_abs_error for one in part.checks if one.name in names]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(names) else None


def _rotary(model: nn.Module) -> str:
    """The rotary styles of the layers, in words: "half", "half + unrotated"."""
    names = dict.fromkeys(style.__name__ for style in rotary_styles(model))
    return " + ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name in names)


def _window(model: nn.Module) -> str:
    """How far the layers see: "full", "sliding", "sliding + full"."""
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        uses = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        kinds = ["sliding" if uses else "full"]
    return " + ".join(dict.fromkeys(kind.removesuffix("_attention") for kind in kinds))
