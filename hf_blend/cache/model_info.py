# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What blending, and what refuses to blend, reads of a model once."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..model.anatomy import decoder_layers, text_config
from ..model.calibrate import ensure_trusted, ignores_states
from ..model.extras import extras_of
from ..model.modality import placeholders_of, refuse_placeholders


class ModelInfo:
    """The layers of a model, how they rotate keys, and what it cannot do.

    Attributes:
        layers: the decoder layers.
        config: the text decoder's.
        placeholders: ids of tokens that stand for something else than text.
        styles: by layer, how its keys are rotated.
        extras: by layer, what it keeps beside K and V.
        ignores_states: several tokens at a time are computed as if none were cached.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_prefix_ids: Sequence[int],
        make_cache: Callable[..., Any],
        allow_unverified: bool,
    ) -> None:
        """Read a model; at its first use test that it can be blended.

        Raises:
            UnsupportedModelError: it cannot be blended exactly, and `allow_unverified` is False.
            PromptError: `chunk_prefix_ids` holds a token that stands for something else than text.
        """
        self.layers = decoder_layers(model)
        self.config = text_config(model)
        self.placeholders = placeholders_of(model)
        refuse_placeholders(model, chunk_prefix_ids, "chunk_prefix_ids", self.placeholders)
        self.styles = ensure_trusted(model, make_cache, allow_unverified)
        self.extras = extras_of(model, len(self.layers))
        self.ignores_states = ignores_states(model)

    def refuse_tokens(self, width: int, past: int) -> None:
        """Raise ConfigError if the model would compute `width` new tokens as if no `past` ones were cached."""
        if self.ignores_states and width > 1 and past:
            raise ConfigError(
                f"{width} tokens came behind the {past} that the cache holds, but the code of "
                f"{self.config.model_type} models takes the states of tokens before into account only "
                "where one token comes at a time. reset() the cache and pass the whole conversation in one prompt, "
                "without prefill_chunk_size."
            )
