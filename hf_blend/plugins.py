# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods are files. To add one, add a file: there is no list to edit.

A *kind* is a sub-package with a `base.py`, such as `selectors` or `store.tiers`. A *plugin* is a file beside it
with exactly one public class that derives from a class of that `base.py`. Its name is the file's name, with `-`
for `_`. A selector, a task or a method of evaluation may also be a file anywhere, by its path.
"""

import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from .errors import ConfigError, PluginNotFoundError, suggest

FILE = ".py"  # how the name of a file of the caller's own ends
_IMPORTS = re.compile(r"^from [\w.]*\bbase import (\([^)]*\)|.*)$", re.MULTILINE)
_CLASSES = re.compile(r"^class [A-Z]\w*\(([^)]*)\)", re.MULTILINE)
_WORDS = re.compile(r"\w+")
# never named by what others wrote, such as an entry
FROM_FILES = ("selectors", "sparse.methods", "evaluation.tasks", "evaluation.methods")


def kinds() -> list[str]:
    """List the kinds of plugin that exist: the sub-packages with a `base.py`."""
    names = set()
    for root in _roots():
        for pattern in ("**/base.py", "evaluation/**/base.py"):  # ** does not follow the link that evaluation may be
            for path in root.glob(pattern):
                names.add(".".join(path.parent.relative_to(root).parts))
    return sorted(names)


def describe(kind: str) -> dict[str, str]:
    """Say what each plugin of a kind does, without importing any."""
    return {name: line for name, (_, line) in sorted(_files(kind).items())}


def load(kind: str, name: str) -> type:
    """Import one plugin, and none of its siblings."""
    if kind in FROM_FILES and name.endswith(FILE):
        return _only_plugin(imported(Path(name).expanduser()), importlib.import_module(f"hf_blend.{kind}.base"))
    dashed = name.replace("_", "-")
    files = _files(kind)
    base = importlib.import_module(f"hf_blend.{kind}.base")
    if dashed in files:
        return _only_plugin(importlib.import_module(f"hf_blend.{kind}.{files[dashed][0]}"), base)
    raise PluginNotFoundError(f"hf_blend.{kind} has no plugin named {name!r}. {suggest(dashed, describe(kind))}")


def extension(name: str) -> ModuleType:
    """Import a module of an extension, a sub-package that the core does without, such as `sparse.decoding`."""
    try:
        return importlib.import_module(f"hf_blend.{name}")
    except ModuleNotFoundError as error:
        if not f"hf_blend.{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"this needs {error.name}, which is not installed here. Install hf_blend whole, or leave the setting out."
        ) from error


def extensions(name: str) -> list[ModuleType]:
    """Import what every extension adds to one part of the core: its module of this name, such as `checks`."""
    paths = sorted(path for root in _roots() for path in root.glob(f"*/{name}.py"))
    return [importlib.import_module(f"hf_blend.{path.parent.name}.{name}") for path in paths]


def _roots() -> list[Path]:
    """The folders whose sub-folders are sub-packages; some installs have evaluation/ elsewhere."""
    spec = importlib.util.find_spec("hf_blend.evaluation")
    beside = [Path(folder).parent for folder in (spec and spec.submodule_search_locations) or ()]
    return list(dict.fromkeys([*map(Path, sys.modules["hf_blend"].__path__), *beside]))


def imported(path: Path) -> ModuleType:
    """The module in a file that no package has; once for each state of the file, so that its class is one class."""
    if not path.is_file():
        raise PluginNotFoundError(f"there is no file {str(path)!r}. Give a Python file that defines one plugin.")
    return _imported_state(path.resolve(), path.stat().st_mtime_ns)


@cache
def _imported_state(path: Path, changed_ns: int) -> ModuleType:
    name = f"hf_blend_file_{path.stem}_{changed_ns}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"the file {str(path)!r} cannot be imported. Give a Python file that defines one plugin.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = f"line {error.lineno}" if isinstance(error, SyntaxError) else type(error).__name__
        raise ConfigError(
            f"the file {str(path)!r} cannot be imported ({where}): {error}. Correct it: python {path.name} shows it."
        ) from error
    return module


@cache
def _files(kind: str) -> dict[str, tuple[str, str]]:
    """Name → (module name, first docstring line) of the files of a kind that hold a plugin."""
    if kind not in kinds():
        raise PluginNotFoundError(f"hf_blend has no kind of plugin named {kind!r}. {suggest(kind, kinds())}")
    files = {}
    for root in _roots():
        for path in sorted(Path(root, *kind.split(".")).glob("[!_]*.py")):
            text = path.read_text("utf-8")
            if path.stem != "base" and _derives_from_base(text):
                docstring = text.partition('"""')[2]
                line = docstring.partition("\n")[0].removesuffix('"""')
                files[path.stem.replace("_", "-")] = (path.stem, line)
    return files


def _derives_from_base(text: str) -> bool:
    """Whether a file has a public class whose parent is imported from `base`."""
    imported = set()
    for names in _IMPORTS.findall(text):
        imported.update(_WORDS.findall(names))
    return any(imported.intersection(_WORDS.findall(parents)) for parents in _CLASSES.findall(text))


def _only_plugin(module: ModuleType, base: ModuleType) -> type:
    """The one public class of a module that derives from a class of `base`."""
    classes = []
    for name, member in vars(module).items():
        if name.startswith("_") or not isinstance(member, type) or member.__module__ != module.__name__:
            continue
        homes = [parent.__module__ for parent in member.__mro__]  # asks no protocol's `isinstance`
        if base.__name__ in homes and member not in classes:
            classes.append(member)
    if len(classes) != 1:
        names = [member.__name__ for member in classes]
        raise ConfigError(
            f"{module.__name__} defines {len(classes)} public plugins ({names}), but a file holds exactly one. Give "
            "each its own file, or start the helper's name with an underscore."
        )
    return classes[0]
