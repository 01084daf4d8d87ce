# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of its model: read once, when the cache is made, and never changed."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..model.anatomy import decoder_layers, text_config
from ..model.calibrate import ensure_trusted, ignores_states
from ..model.extras import extras_of
from ..model.modality import placeholders_of, refuse_placeholders
from ..prompt.pieces import Prompt, TextPrompt, check_lengths


class ModelTraits:
    """What blending and its refusals need to know of a model."""

    def __init__(
        self,
        model: nn.Module,
        chunk_prefix_ids: Sequence[int],
        make_cache: Callable[..., Any],
        allow_unverified: bool,
        digest: str,
    ) -> None:
        """Read a model whose structure has this digest; at its first use test that it can be blended.

        Raises:
            UnsupportedModelError: it cannot be blended exactly, and `allow_unverified` is False.
            PromptError: `chunk_prefix_ids` holds a token that stands for something else than text.
        """
        self.layers, self.config = decoder_layers(model), text_config(model)  # the config is the text decoder's
        self.placeholders = placeholders_of(model, digest)  # ids of tokens that stand for something else than text
        refuse_placeholders(model, chunk_prefix_ids, "chunk_prefix_ids", self.placeholders)
        self.styles = ensure_trusted(model, make_cache, allow_unverified, digest)  # how each layer rotates its keys
        self.extras = extras_of(model, len(self.layers), digest)
        self.ignores_states = ignores_states(model, digest)  # wherever several tokens come at a time

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
