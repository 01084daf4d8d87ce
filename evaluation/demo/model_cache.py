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
from ..bundled import REAL, ModelSource, first_line, open_model, size_of

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
MOST_ID_LETTERS = 96
FAILURES = (ImportError, LookupError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class Loaded:
    """A model that was found to be exact."""

    name: str
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
    ) -> None:
        self.most_models = most_models
        self.most_parameters = most_parameters
        self.takes_folders = takes_folders
        self._device = device
        self._dtype = dtype
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str = "") -> Loaded:
        """Give a model, loading and verifying it if it is not loaded."""
        name = name.strip() or REAL
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            self._loaded.move_to_end(name)
            while len(self._loaded) > self.most_models:
                self._loaded.popitem(last=False)
            return self._loaded[name]

    def _load(self, name: str) -> Loaded:
        folder = _located(name) if name in PACKAGED else self._checked(name)
        try:
            source = open_model(folder, self._device, self._dtype)
            self._refuse_too_large(source, name)
            model = source.load()
        except HfBlendError:
            raise
        except FAILURES as error:
            raise ConfigError(
                f"the model {name!r} cannot be loaded: {first_line(error)} Give the id of a causal language model on "
                f"the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct, or leave the box empty for {REAL}."
            ) from error
        BlendCache(model, ChunkStore.open("memory://"))  # raises if it is not exact
        return Loaded(name, model, source)

    def _checked(self, name: str) -> str:
        """A folder where that is allowed, or what looks like a hub id."""
        folder = os.path.expanduser(name)
        if self.takes_folders and os.path.isdir(folder):  # pathlib raises where a name is too long
            return folder
        is_id = HUB_ID.fullmatch(name) and ".." not in name and len(name) <= MOST_ID_LETTERS
        if not is_id or os.path.exists(name):
            raise ConfigError(
                f"{name!r:.80} is no model id. Write owner/name as on the hub"
                f"{', or a folder with a model' if self.takes_folders else ''}."
            )
        return name

    def _refuse_too_large(self, source: ModelSource, name: str) -> None:
        """Refuse what is too large, from the config alone."""
        if source.parameters > self.most_parameters:
            raise ConfigError(
                f"the model {name!r} has {size_of(source.parameters)}, at most {size_of(self.most_parameters)} are "
                "taken here. Take a smaller one, or run hf-blend demo on your own machine with --most-parameters."
            )


def _located(name: str) -> str:
    """The folder of a model that has a short name; its hub id where it is not on this machine."""
    try:
        return locate(name)
    except MissingExtraError:
        return PACKAGED[name].hub_id
