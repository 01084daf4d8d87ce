# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of its model: read once, when the cache is made, and never changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..model.anatomy import decoder_layers, text_config
from ..model.calibrate import ensure_trusted, ignores_states
from ..model.extras import LayerExtra, extras_of
from ..model.modality import placeholders_of, refuse_placeholders
from ..prompt.pieces import Prompt, TextPrompt, check_lengths
from ..rotary.base import RotaryStyle


@dataclass(frozen=True)
class ModelTraits:
    """What blending and its refusals need to know of a model.

    Attributes:
        model: the model.
        layers: its decoder layers.
        config: of its text decoder.
        placeholders: token ids that stand for something else than text.
        styles: for each layer how its keys are rotated.
        extras: for each layer what it keeps beside K and V; None for most.
        ignores_states: its code starts from an empty state wherever several tokens come at a time.
    """

    model: nn.Module
    layers: Sequence[nn.Module]
    config: Any
    placeholders: frozenset[int]
    styles: tuple[type[RotaryStyle], ...]
    extras: Sequence[LayerExtra | None]
    ignores_states: bool

    @classmethod
    def of(
        cls,
        model: nn.Module,
        chunk_prefix_ids: Sequence[int],
        make_cache: Callable[..., Any],
        allow_unverified: bool,
        digest: str,
    ) -> "ModelTraits":
        """Read a model whose structure has this digest; at its first use test that it can be blended.

        Raises:
            UnsupportedModelError: it cannot be blended exactly, and `allow_unverified` is False.
            PromptError: `chunk_prefix_ids` holds a token that stands for something else than text.
        """
        placeholders, layers = placeholders_of(model, digest), decoder_layers(model)
        refuse_placeholders(model, chunk_prefix_ids, "chunk_prefix_ids", placeholders)
        styles = ensure_trusted(model, make_cache, allow_unverified, digest)
        extras = extras_of(model, len(layers), digest)
        return cls(model, layers, text_config(model), placeholders, styles, extras, ignores_states(model, digest))

    def check_fit(self, prompts: Sequence[Prompt | TextPrompt], cached: int) -> None:
        """Refuse prompts that do not fit the model, or its buffers, behind so many cached tokens."""
        check_lengths(prompts, cached, self.config)
        self.refuse_tokens(cached + max(len(prompt.ids) for prompt in prompts), 0)

    def refuse_tokens(self, width: int, past: int) -> None:
        """Refuse `width` new tokens that the model would compute as if the cache of `past` tokens were empty."""
        if self.ignores_states and width > 1 and past:
            raise ConfigError(
                f"{width} tokens came behind the {past} that the cache holds, but the code of "
                f"{self.config.model_type} models takes the states of tokens before into account only "
                "where one token comes at a time. reset() the cache and pass the whole conversation in one prompt, "
                "without prefill_chunk_size."
            )
