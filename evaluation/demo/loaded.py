# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model that the page answers with: one, and none that cannot be blended exactly."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import MissingExtraError
from hf_blend.model_names import PACKAGED, locate

from ..answering import token_bytes
from ..bundled import REAL, ModelSource, open_model


@dataclass(frozen=True)
class Loaded:
    """A model that was found to be exact."""

    model: nn.Module
    source: ModelSource

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.source.tokenizer

    @cached_property
    def token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return token_bytes(self.model)


def load_exact(name: str = REAL, device: str = "auto", dtype: str = "auto") -> Loaded:
    """Load a model and verify it; one that has a short name comes from the hub where it is not on this machine.

    Raises:
        ConfigError: there is no such model, or it cannot be read.
        UnsupportedModelError: it cannot be blended.
    """
    if name in PACKAGED:
        try:
            name = locate(name)
        except MissingExtraError:
            name = PACKAGED[name].hub_id
    source = open_model(name, device, dtype)
    model = source.load()
    BlendCache(model, ChunkStore.open("memory://"))  # raises if it is not exact
    return Loaded(model, source)
