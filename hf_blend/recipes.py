# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How a model is blended where a caller says nothing: what `hf-blend tune` found for it, kept beside the chunks.

A recipe chooses which tokens are recomputed, and how many; at no value of it is an answer wrong.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config import BlendConfig
from .errors import ConfigError, HfBlendError

logger = logging.getLogger(__name__)

SETTINGS = ("selector", "selector_options", "recompute_ratio", "check_layers", "corrector", "corrector_options")


@dataclass(frozen=True)
class Recipe:
    """Settings of a blend that were measured for one model.

    Attributes:
        settings: fields of `BlendConfig`, of `SETTINGS`.
        source: on what they were chosen, in a sentence.
    """

    settings: Mapping[str, Any]
    source: str

    def config(self, **settings: Any) -> BlendConfig:
        """Give the config, with settings that override the recipe's.

        Raises:
            ConfigError: a setting is refused.
        """
        return BlendConfig.from_dict({**self.settings, **settings})


class Recipes:
    """The recipes of a store, by the fingerprint of the model: a small file for each.

    Args:
        folder: where the files are; None keeps recipes in this process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._by_model: dict[str, Recipe | None] | None = None  # None: the folder was not looked at yet

    def _known(self) -> dict[str, Recipe | None]:
        """Recipes by model; None for a file that was not read yet."""
        if self._by_model is None:
            self._by_model = {}
            with contextlib.suppress(OSError):
                self._by_model = {path.stem: None for path in self._folder.glob("*.json")} if self._folder else {}
        return self._by_model

    def __bool__(self) -> bool:
        """Return True if some model has one; looks into the folder once."""
        return bool(self._known())

    def get(self, fingerprint: str) -> Recipe | None:
        """Find the recipe of a model; one that cannot be read is left out, and named in a warning."""
        by_model = self._known()
        recipe = by_model.get(fingerprint)
        if recipe is not None or self._folder is None or fingerprint not in by_model:
            return recipe
        path = self._folder / f"{fingerprint}.json"
        try:
            values = json.loads(path.read_text("utf-8"))
            recipe = Recipe({name: values["settings"][name] for name in values["settings"]}, str(values["source"]))
            if unknown := set(recipe.settings) - set(SETTINGS):
                raise ConfigError(f"it has the settings {sorted(unknown)}, expected some of {SETTINGS}")
            recipe.config()
        except (OSError, ValueError, KeyError, TypeError, HfBlendError) as error:
            logger.warning("the recipe %s is left out: %s. Run hf-blend tune again.", path, error)
            del by_model[fingerprint]
            return None
        by_model[fingerprint] = recipe
        return recipe

    def put(self, fingerprint: str, recipe: Recipe) -> None:
        """Keep the recipe of a model in the place of an earlier one; the file is whole or absent."""
        self._known()[fingerprint] = recipe
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f"{fingerprint}.{os.getpid()}.part"
        temporary.write_text(json.dumps(asdict(recipe), sort_keys=True), "utf-8")
        temporary.replace(self._folder / f"{fingerprint}.json")
