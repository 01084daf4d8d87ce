# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a blend where a command is given none: calibrated if that is asked for, and said in a line."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import progress, say

if TYPE_CHECKING:
    from torch import nn

    from hf_blend import BlendConfig, ChunkStore
    from hf_blend.evaluation.asking import Pipeline
    from hf_blend.evaluation.calibration import Calibration
    from hf_blend.recipes import Recipe

Calibrate = Annotated[
    bool,
    typer.Option("--calibrate", help="Find the rule for this model first, on bundled prompts; once, kept in --store."),
]


def calibrated(
    model: "nn.Module", tokenizer: Any, store: "ChunkStore", *, quiet: bool = False, **settings: Any
) -> "Calibration":
    """Calibrate a model, and say before what that takes, and behind it what was tried and chosen."""
    from hf_blend.evaluation import calibration

    say(calibration.NOTICE)
    got = calibration.calibrate(
        model, tokenizer, store, watch=lambda items, what: progress(items, what, quiet=quiet), **settings
    )
    for line in (*calibration.lines(got.points), f"Chosen: {got.recipe.source}."):
        say(line)
    return got


def calibrate_once(model: "nn.Module", tokenizer: Any, store: "ChunkStore", allow_unverified: bool = False) -> None:
    """Calibrate a model of which the store has no recipe."""
    from hf_blend.model.fingerprint import fingerprint

    if store.recipes.get(fingerprint(model)) is None:
        calibrated(model, tokenizer, store, allow_unverified=allow_unverified)


def say_recipe(recipe: "Recipe") -> None:
    """Say where the rule is from that is used, or how to find one."""
    from hf_blend.recipes import DEFAULT

    if recipe is DEFAULT:
        say("No rule was measured for this model or its family, so the default is used: --calibrate finds one, once.")
    else:
        say(f"Rule for the tokens to recompute: {recipe.source}.")


def choose_config(
    pipeline: "Pipeline", selector: str | None, ratio: float | None, allow_unverified: bool, calibrate: bool = False
) -> "BlendConfig":
    """The config of a command: from its options, and from the model's recipe where no selector is named."""
    from hf_blend.evaluation.answering import blend_config

    if calibrate:
        calibrate_once(pipeline.model, pipeline.tokenizer, pipeline.store, allow_unverified)
    if selector is not None:
        return blend_config(selector, recompute_ratio=ratio, allow_unverified=allow_unverified)
    recipe = pipeline.store.recipe(pipeline.model)
    say_recipe(recipe)
    settings = {} if ratio is None else {"recompute_ratio": ratio}
    return recipe.config(is_blind=pipeline.store.loads_in_part, allow_unverified=allow_unverified, **settings)
