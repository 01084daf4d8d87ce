# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a blend where a command is given none: calibrated if that is asked for, and said in a line."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import progress, say

if TYPE_CHECKING:
    from torch import nn

    from hf_blend import BlendConfig, ChunkStore
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


def calibrate_once(
    model: "nn.Module", tokenizer: Any, store: "ChunkStore", calibrate: bool, allow_unverified: bool = False
) -> "Recipe":
    """Calibrate a model if that is asked for and the store has no recipe of it; give the one that it has then."""
    from hf_blend.model.fingerprint import fingerprint
    from hf_blend.recipes import DEFAULT

    if calibrate and store.recipes.get(fingerprint(model)) is None:
        calibrated(model, tokenizer, store, allow_unverified=allow_unverified)
    recipe = store.recipe(model)
    if recipe is DEFAULT:
        say("No rule was measured for this model or its family, so the default is used: --calibrate finds one, once.")
    return recipe


def chosen(
    model: "nn.Module",
    tokenizer: Any,
    store: "ChunkStore",
    selector: str | None,
    *,
    calibrate: bool = False,
    is_blind: bool = False,
    **settings: Any,
) -> "BlendConfig":
    """Give the config of a command: what its arguments say, and what they leave out from the model's recipe."""
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.recipes import DEFAULT

    if selector is None or calibrate:
        calibrate_once(model, tokenizer, store, calibrate, settings.get("allow_unverified", False))
    recipe = DEFAULT if selector is not None else store.recipe(model, is_blind=is_blind)
    if recipe is not DEFAULT:
        say(f"What is recomputed: {recipe.source}.")
    return blend_config(selector, is_blind=is_blind, recipe=recipe, **settings)
