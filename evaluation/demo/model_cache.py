# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The models of the page, first its own and then those that visitors name; none that cannot be blended exactly."""

import os
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, HfBlendError, MissingExtraError
from hf_blend.model_names import PACKAGED, locate

from ..answering import token_bytes
from ..bundled import ModelSource, first_line, open_model, size_of
from ..meaning import Encoder
from ..model_choice import ModelChoice, choose_model

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
FAILURES = (ImportError, LookupError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Loaded:
    """A model that was found to be exact."""

    name: str
    model: nn.Module
    source: ModelSource
    encoder: Encoder | None = None  # what finds pieces of files by meaning

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.source.tokenizer

    @cached_property
    def token_bytes(self) -> int:
        """K and V of one token, all layers."""
        return token_bytes(self.model)


class ModelCache:
    """Keeps the models that were asked for last."""

    def __init__(
        self,
        *,
        most_models: int = 2,
        most_parameters: int = 2_000_000_000,
        takes_folders: bool = True,
        device: str = "auto",
        dtype: str = "auto",
        encoder: Encoder | None = None,
    ) -> None:
        self.most_models, self.most_parameters, self.takes_folders = most_models, most_parameters, takes_folders
        self._on, self._encoder = (device, dtype), encoder
        self._choice: ModelChoice | None = None
        self._held: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def choice(self) -> ModelChoice:
        """The best model that is here, chosen once, for those who name none."""
        with self._lock:
            self._choice = self._choice or choose_model(*self._on, self.most_parameters)
        return self._choice

    def take(self, name: str = "") -> Loaded:
        """Give a model, loading and verifying it if it is not held."""
        name = name.strip() or self.choice.source.name
        with self._lock:
            if name not in self._held:
                self._held[name] = self._load(name)
            self._held.move_to_end(name)
            while len(self._held) > self.most_models:
                self._held.popitem(last=False)
            return self._held[name]

    def _load(self, name: str) -> Loaded:
        try:
            if self._choice and name == self._choice.source.name:
                source = self._choice.source
            else:
                folder = _located(name) if name in PACKAGED else self._checked(name)
                source = open_model(folder, *self._on)
            self._weigh(source, name)
            model = source.load()
        except HfBlendError:
            raise
        except FAILURES as error:
            raise ConfigError(
                f"the model {name!r} cannot be loaded: {first_line(error)} Give the id of a causal language model on "
                "the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct, or leave the box empty for the best one here."
            ) from error
        BlendCache(model, ChunkStore.open("memory://"))  # raises if it is not exact
        return Loaded(name, model, source, self._encoder)

    def _checked(self, name: str) -> str:
        """A folder where that is allowed, or what looks like a hub id."""
        folder = os.path.expanduser(name)
        if self.takes_folders and os.path.isdir(folder):  # pathlib raises where a name is too long
            return folder
        if not HUB_ID.fullmatch(name) or ".." in name or len(name) > 96 or os.path.exists(name):
            raise ConfigError(
                f"{name!r:.80} is no model id. Write owner/name as on the hub"
                f"{', or a folder with a model' if self.takes_folders else ''}."
            )
        return name

    def _weigh(self, source: ModelSource, name: str) -> None:
        """Refuse what is too large, from the config alone."""
        if source.parameters > self.most_parameters:
            raise ConfigError(
                f"the model {name!r} has {size_of(source.parameters)}, at most {size_of(self.most_parameters)} are "
                "taken here. Take a smaller one, or run hf-blend demo on your own machine with --most-parameters."
            )


def _located(name: str) -> str:
    """The folder of a model that has a name; its hub id where it is not on this machine."""
    try:
        return locate(name)
    except MissingExtraError:
        return PACKAGED[name].hub_id
