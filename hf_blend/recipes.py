# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How a model is blended where a caller says nothing: what was found for it, or the default.

What `hf-blend tune` finds for a model is kept beside the chunks. A recipe chooses which tokens are recomputed, and how
many; at no value of it is an answer wrong.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import plugins
from .config import BlendConfig
from .errors import ConfigError
from .store.tiers.base import EntryFault, as_fault
from .store.tiers.disk import read_json, write_json

logger = logging.getLogger(__name__)

SETTINGS = ("selector", "selector_options", "recompute_ratio", "check_layer")


@dataclass(frozen=True)
class Recipe:
    """Settings of a blend that were measured for one model.

    Attributes:
        settings: fields of `BlendConfig`, of `SETTINGS`; none are those of the default.
        source: on what they were chosen, in a sentence.
    """

    settings: Mapping[str, Any]
    source: str

    def config(self, **settings: Any) -> BlendConfig:
        """Give the config, with settings that override the recipe's.

        Raises:
            ConfigError: a setting is refused.
        """
        return BlendConfig(**{**self.settings, **settings})

    def needs_question(self) -> bool:
        """Return True if its selector runs the question over all stored KV before it chooses."""
        name = self.settings.get("selector")
        if name is None:
            return False
        selector = plugins.load("selectors", name)(self.settings.get("selector_options") or {})
        return bool(selector.needs_question)

    def names_file(self) -> bool:
        """Return True if the selector is named by a file."""
        return str(self.settings.get("selector")).endswith(plugins.FILE)


DEFAULT = Recipe({}, "the default")


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

    def get(self, fingerprint: str, layers: int) -> Recipe | None:
        """Find the recipe of a model with so many layers; one that cannot be used is left out with a warning."""
        by_model = self._known()
        recipe = by_model.get(fingerprint)
        if recipe is not None or self._folder is None or fingerprint not in by_model:
            return recipe
        path = self._folder / f"{fingerprint}.json"
        try:
            recipe = _read(path, layers)
        except (OSError, EntryFault) as error:
            logger.warning("the recipe %s is left out: %s. Run hf-blend tune again.", path, error)
            del by_model[fingerprint]
            return None
        by_model[fingerprint] = recipe
        return recipe

    def put(self, fingerprint: str, recipe: Recipe) -> None:
        """Keep the recipe of a model in the place of an earlier one; the file is whole or absent.

        One that names a file of the caller's own is kept in this process alone: nobody runs what a folder names.
        """
        self._known()[fingerprint] = recipe
        if recipe.names_file():
            logger.warning(
                "the recipe names a file of Python, and is kept in this process alone. Name it in each call."
            )
        elif self._folder is not None:
            write_json(self._folder / f"{fingerprint}.json", asdict(recipe))


def _read(path: Path, layers: int) -> Recipe:
    """The recipe in a file that others may have written, for a model with so many layers; raises EntryFault."""
    values = read_json(path)
    with as_fault("it"):
        recipe = Recipe({**values["settings"]}, str(values["source"]))
        unknown = set(recipe.settings) - set(SETTINGS)
        if unknown:
            raise ConfigError(f"it has the settings {sorted(unknown)}, expected some of {SETTINGS}")
        if recipe.names_file():
            raise ConfigError("it names a file of Python, but others may write to a store's folder")
        BlendConfig.from_dict(recipe.settings).refuse_depth(layers)
        recipe.needs_question()  # its selector exists, and has these options
    return recipe
