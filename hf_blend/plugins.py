# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Methods are files. To add one, add a file: there is no list to edit.

A *kind* is a sub-package with a `base.py`, such as `selectors` or `store.tiers`. A *plugin* is a file beside it
with exactly one public class that derives from a class of that `base.py`. Its name is the file's name, with `-`
for `_`. Other distributions add plugins by entry points in the group `hf_blend.<kind>`; they cannot replace ours.
A selector, a task or a method of evaluation may also be a file anywhere, by its path.
"""

import importlib
import importlib.util
import logging
import re
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from .errors import ConfigError, PluginNotFoundError, suggest

logger = logging.getLogger(__name__)

FILE = ".py"  # how the name of a file of the caller's own ends
_IMPORTS = re.compile(r"^from [\w.]*\bbase import (\([^)]*\)|.*)$", re.MULTILINE)
_CLASSES = re.compile(r"^class [A-Z]\w*\(([^)]*)\)", re.MULTILINE)
# never named by what others wrote, such as an entry
FROM_FILES = ("selectors", "evaluation.tasks", "evaluation.methods")


def kinds() -> list[str]:
    """List the kinds of plugin that exist: the sub-packages with a `base.py`."""
    patterns = ("**/base.py", "evaluation/**/base.py")  # in a checkout evaluation is a link, which ** does not follow
    bases = [(root, path) for root in _roots() for pattern in patterns for path in root.glob(pattern)]
    return sorted({".".join(path.parent.relative_to(root).parts) for root, path in bases})


def describe(kind: str) -> dict[str, str]:
    """Say what each plugin of a kind does, without importing any."""
    ours = {name: line for name, (_, line) in _files(kind).items()}
    theirs = {name: f"{point.value} (installed plugin)" for name, point in _installed(kind).items()}
    return dict(sorted((theirs | ours).items()))


def load(kind: str, name: str) -> type:
    """Import one plugin, and none of its siblings."""
    if kind in FROM_FILES and name.endswith(FILE):
        return _only_plugin(imported(Path(name).expanduser()), importlib.import_module(f"hf_blend.{kind}.base"))
    dashed = name.replace("_", "-")
    files = _files(kind)
    base = importlib.import_module(f"hf_blend.{kind}.base")
    if dashed in files:
        return _only_plugin(importlib.import_module(f"hf_blend.{kind}.{files[dashed][0]}"), base)
    installed = _installed(kind)
    if dashed in installed:
        return _checked(installed[dashed], base)
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
    folders = [Path(root, *kind.split(".")) for root in _roots()]
    paths = [path for folder in folders for path in sorted(folder.glob("[!_]*.py"))]
    texts = {path.stem: path.read_text("utf-8") for path in paths}
    return {
        stem.replace("_", "-"): (stem, text.partition('"""')[2].partition("\n")[0].removesuffix('"""'))
        for stem, text in texts.items()
        if stem != "base" and _derives_from_base(text)
    }


def _derives_from_base(text: str) -> bool:
    """Whether a file has a public class whose parent is imported from `base`."""
    names = {name for imported in _IMPORTS.findall(text) for name in re.findall(r"\w+", imported)}
    return any(names.intersection(re.findall(r"\w+", parents)) for parents in _CLASSES.findall(text))


def _installed(kind: str) -> dict[str, EntryPoint]:
    """Name → entry point of the plugins that other distributions offer for a kind."""
    ours, points = _files(kind), {}
    for point in entry_points(group=f"hf_blend.{kind}"):
        name = point.name.replace("_", "-")
        if name in ours or name in points:
            logger.warning("ignoring the plugin %s: hf_blend.%s already has a %r", point.value, kind, name)
        else:
            points[name] = point
    return points


def _only_plugin(module: ModuleType, base: ModuleType) -> type:
    """The one public class of a module that derives from a class of `base`."""
    own = [member for member in vars(module).values() if isinstance(member, type)]
    classes = [cls for cls in own if cls.__module__ == module.__name__ and not cls.__name__.startswith("_")]
    plugins = [cls for cls in classes if _derives(cls, base)]
    if len(plugins) != 1:
        raise ConfigError(
            f"{module.__name__} defines {len(plugins)} public plugins ({[cls.__name__ for cls in plugins]}), but a "
            "file holds exactly one. Give each its own file, or start the helper's name with an underscore."
        )
    return plugins[0]


def _checked(point: EntryPoint, base: ModuleType) -> type:
    """What an entry point loads, if it is a plugin of this kind."""
    plugin = point.load()
    if not (isinstance(plugin, type) and _derives(plugin, base)):
        raise ConfigError(
            f"the entry point {point.name!r} ({point.value}) gives {plugin!r}, but a class deriving from one of "
            f"{base.__name__} is expected. Correct the entry point in the distribution that installed it."
        )
    return plugin


def _derives(cls: type, base: ModuleType) -> bool:
    """Whether a class has a parent that a kind's `base.py` defines; asks no protocol's `isinstance`."""
    return any(parent.__module__ == base.__name__ for parent in cls.__mro__)
