# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a blend where a command is given none, said in a line."""

from typing import TYPE_CHECKING

from .output import say

if TYPE_CHECKING:
    from hf_blend import BlendConfig
    from hf_blend.evaluation.asking import Pipeline
    from hf_blend.recipes import Recipe


def say_recipe(recipe: "Recipe") -> None:
    """Say where the rule is from that is used, or how to find one."""
    from hf_blend.recipes import DEFAULT

    if recipe is DEFAULT:
        say("The default rule is used. `hf-blend tune --store` looks once for one that suits this model better.")
    else:
        say(f"Rule for the tokens to recompute: {recipe.source}.")


def choose_config(
    pipeline: "Pipeline", selector: str | None, ratio: float | None, allow_unverified: bool
) -> "BlendConfig":
    """The config of a command: from its options, and from the model's recipe where no selector is named."""
    from hf_blend.evaluation.answering import blend_config

    if selector is not None:
        return blend_config(selector, recompute_ratio=ratio, allow_unverified=allow_unverified)
    recipe = pipeline.store.recipe(pipeline.model)
    say_recipe(recipe)
    settings = {} if ratio is None else {"recompute_ratio": ratio}
    return recipe.config(allow_unverified=allow_unverified, **settings)
