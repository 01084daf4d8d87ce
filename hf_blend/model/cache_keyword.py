# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The keyword by which a stock model takes its cache: `cache` since transformers 5.24, `past_key_values` before."""

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import nn
from transformers import GenerationMixin

KEYWORDS = ("cache", "past_key_values")
KEYWORD = next(
    name for name in KEYWORDS if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


@lru_cache(maxsize=256)
def _keyword(forward: Any) -> str:
    parameters = inspect.signature(forward).parameters
    return next((name for name in KEYWORDS if name in parameters), KEYWORD)


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """A cache as the keyword argument of a model's forward or of its `generate`.

    Models with code of their own may know the older name only. A wrapper, whose forward names neither, hands on what
    it is given: it gets the name that transformers uses.
    """
    return {_keyword(type(model).forward): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either name; None where there is none."""
    return next((arguments[name] for name in KEYWORDS if arguments.get(name) is not None), None)


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call but for its cache."""
    return {name: value for name, value in arguments.items() if name not in KEYWORDS}
