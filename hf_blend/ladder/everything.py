# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every model type of the installed transformers: exact, or refused with a reason."""

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..anatomy import text_config
from ..calibrate import rotary_styles
from .ladder import FAILURES, verify
from .zoo import TINY, load_model, tiny_types

RUNGS = ("layer_0", "moved_chunk", "ratio_1", "ratio_1_batch", "all_but_one", "fused_ratio", "causality", "untouched")
MEASURED = ("ratio_1", "ratio_1_batch", "all_but_one", "fused_ratio")  # rungs whose error is one of logits
DTYPE = "float32"


def verify_types(
    types: Iterable[str] | None = None, attention: tuple[str, ...] = ("sdpa", "eager")
) -> Iterator[dict[str, Any]]:
    """Climb the rungs that tell right from wrong with a tiny random model of each type.

    Args:
        types: as in `config.json`; None is every causal type of transformers.
        attention: the first of these that a type supports is used.

    Yields:
        `model` (its type), `supported`, `reason`, `rotary`, `window`, `max_abs_error` (of logits, float32) and
        `seconds`. What breaks in a way that nobody foresaw has a reason that begins with "crashed".
    """
    for model_type in tiny_types() if types is None else types:
        started = time.perf_counter()
        row = {"model": model_type, **_row(model_type, attention)}
        yield {**row, "seconds": round(time.perf_counter() - started, 1)}


def _row(model_type: str, attention: tuple[str, ...]) -> dict[str, Any]:
    loaded: list[nn.Module] = []

    def load(*how: Any) -> nn.Module:
        loaded.append(load_model(*how))
        return loaded[-1]

    try:
        verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[:1], rungs=RUNGS, load=load)
        if not verdict.rungs and verdict.refusal is None:
            verdict = verify(TINY + model_type, dtypes=[DTYPE], attention=attention[1:], rungs=RUNGS, load=load)
    except (*FAILURES, AssertionError, ImportError, OSError) as error:
        return _found(False, f"crashed: {type(error).__name__}: {error}", loaded, None)
    errors = [rung.max_abs_error for rung in verdict.rungs if rung.name in MEASURED]
    known = [error for error in errors if error is not None]
    return _found(verdict.supported, verdict.reason, loaded, max(known) if len(known) == len(MEASURED) else None)


def _found(supported: bool, reason: str | None, loaded: list[nn.Module], error: float | None) -> dict[str, Any]:
    rotary, window = ("", "") if not (supported and loaded) else (_rotary(loaded[-1]), _window(loaded[-1]))
    return {
        "supported": supported,
        "reason": reason,
        "rotary": rotary,
        "window": window,
        "max_abs_error": error,
    }


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
