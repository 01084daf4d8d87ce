# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods by name: those of `hf_blend.evaluation.methods`, and every selector by its own name."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from hf_blend import plugins
from hf_blend.errors import ConfigError, PluginNotFoundError, suggest

from .answering import blend_config
from .methods.base import Blended, EvalMethod

WITHOUT_RATIO = ("none", "full")  # selectors that are no methods of their own


class Blending(Blended):
    """A selector at a ratio; options may stand behind its name, such as `kv-deviation:on=k`."""

    def __init__(self, selector: str, ratio: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.config = blend_config(selector, recompute_ratio=ratio)


@cache
def method_names() -> dict[str, str]:
    """Every method that its name alone makes, and what it does; the ends of the scale first, as in tables."""
    fixed = plugins.describe("evaluation.methods")
    first = ("full-prefill", "prefix-caching", "full-reuse")
    selectors = {name: line for name, line in plugins.describe("selectors").items() if name not in WITHOUT_RATIO}
    rest = {name: line for name, line in fixed.items() if name not in first}
    ends = {name: fixed[name] for name in first}
    return {**ends, **selectors, **rest}


@cache
def takes_ratio(name: str) -> bool:
    """Whether a method has a ratio."""
    path = name.partition(":")[0]
    if path.endswith(plugins.FILE):
        try:
            return not plugins.load("evaluation.methods", path)
        except ConfigError:  # a selector; what is neither is refused here
            return bool(plugins.load("selectors", path))
    plain = path.replace("_", "-")
    if plain not in method_names():
        raise PluginNotFoundError(f"there is no method {name!r}. {suggest(plain, method_names())}")
    return plain in plugins.describe("selectors")


def variants(text: str, ratios: Sequence[float]) -> list[tuple[str, float | None]]:
    """The method of a text with every ratio that it takes: pairs of name and ratio."""
    name, at, ratio = text.rpartition("@")
    if not at:
        return [(text, ratio) for ratio in (ratios if takes_ratio(text) else (None,))]
    try:
        own = float(ratio)
    except ValueError:
        raise ConfigError(f"the method {text!r} has no ratio behind its @. Write one, such as boundary@0.1.") from None
    if not takes_ratio(name) or not 0 <= own <= 1:
        raise ConfigError(f"the method {text!r} has a ratio of {own}, but takes none, or none but 0 to 1.")
    return [(name, own)]


def make_method(name: str, ratio: float | None, *arguments: Any) -> EvalMethod:
    """Make a method ready."""
    if takes_ratio(name):
        return Blending(name, 0.0 if ratio is None else ratio, *arguments)
    made: EvalMethod = plugins.load("evaluation.methods", name)(*arguments)
    return made
