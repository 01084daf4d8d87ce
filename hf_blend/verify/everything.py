# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every model type of the installed transformers: blended, moved and extended exactly, or refused with a reason.

A type of which no tiny model can be built is neither: it is not judged, and counted apart.
"""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..cache.blend_cache import BlendCache
from ..errors import UnsupportedModelError
from ..model.anatomy import text_config
from ..model.calibrate import rotary_styles
from ..store import ChunkStore
from .ladder import FAILURES, Verdict, verify
from .zoo import NOT_JUDGED, TINY, load_model, tiny_types

RUNGS = ("layer_0", "moved_chunk", "ratio_1", "ratio_1_batch", "all_but_one", "fused_ratio", "causality", "untouched")
MOVE_RUNGS = ("whole_shift", "closed_hole")
EXTEND_RUNGS = ("self_extend",)
MEASURED = ("ratio_1", "ratio_1_batch", "all_but_one", "fused_ratio")  # rungs whose error is one of logits
DTYPE = "float32"
EXACT = "exact"
BROKEN = ("crashed: ", "wrong: ")  # how a verdict begins that is neither exact nor a refusal


def verify_types(
    types: Iterable[str] | None = None, attention: tuple[str, ...] = ("sdpa", "eager")
) -> Iterator[dict[str, Any]]:
    """Climb the rungs that tell right from wrong with a tiny random model of each type."""
    for model_type in tiny_types() if types is None else types:
        started = time.perf_counter()
        row = {"model": model_type, **_row(model_type, attention)}
        yield {**row, "seconds": round(time.perf_counter() - started, 1)}


def broken(row: dict[str, Any]) -> bool:
    """Whether a row says of anything that it crashed or is wrong without a refusal."""
    return any(str(row.get(name) or "").startswith(BROKEN) for name in ("reason", "move", "extend"))


def judged(row: dict[str, Any]) -> bool:
    """Whether there was a tiny model of a row's type to try, or its config told enough."""
    return not str(row["reason"] or "").startswith(NOT_JUDGED)


def _row(model_type: str, attention: tuple[str, ...]) -> dict[str, Any]:
    loaded: list[nn.Module] = []

    def load(*how: Any) -> nn.Module:
        loaded.append(load_model(*how))
        return loaded[-1]

    rungs = (*RUNGS, *MOVE_RUNGS, *EXTEND_RUNGS)
    try:
        verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[:1], rungs=rungs, load=load)
        if not verdict.rungs and verdict.refusal is None:
            verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[1:], rungs=rungs, load=load)
    except (*FAILURES, AssertionError, ImportError, OSError) as error:
        verdict = Verdict(model_type, refusal=f"crashed: {type(error).__name__}: {error}")
    blend, move, extend = (_part(verdict, names) for names in (RUNGS, MOVE_RUNGS, EXTEND_RUNGS))
    styled = blend.supported and loaded
    return {
        "supported": blend.supported,
        "reason": _refusal(blend, loaded),
        "max_abs_error": _largest(blend, MEASURED),
        "move": _verdict(move),
        "move_error": _largest(move, MOVE_RUNGS[:1]),
        "extend": _verdict(extend),
        "extend_error": _largest(extend, EXTEND_RUNGS),
        "rotary": _rotary(loaded[-1]) if styled else "",
        "window": _window(loaded[-1]) if styled else "",
    }


def _part(verdict: Verdict, names: tuple[str, ...]) -> Verdict:
    return replace(verdict, rungs=[rung for rung in verdict.rungs if rung.name in names])


def _refusal(blend: Verdict, loaded: list[nn.Module]) -> str | None:
    """Why a type is not blended: its refusal, or that of its self-test where rungs fail."""
    if not blend.failed or blend.refusal is not None:
        return blend.reason
    try:
        BlendCache(loaded[-1], ChunkStore.open("memory://"))
    except UnsupportedModelError as error:
        return str(error)
    return f"wrong: {blend.reason}"


def _verdict(part: Verdict) -> str:
    """Either "exact", or why not; the self-test has been passed where a rung was measured."""
    if part.refusal is not None:
        return part.refusal
    if part.failed:
        return f"wrong: {part.reason}"
    return part.refused[0].detail if part.refused else EXACT


def _largest(part: Verdict, names: tuple[str, ...]) -> float | None:
    """The largest error of some rungs; None unless all were measured."""
    errors = [rung.max_abs_error for rung in part.rungs if rung.name in names]
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
