# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Imports flow one way, a method is known by its name only, and `import hf_blend` brings nothing heavy along."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_blend
from hf_blend import plugins
from tests.source import ROOT, tree_of

HOMES = {"hf_blend": ROOT / "hf_blend", "hf_blend.cli": ROOT / "cli", "hf_blend.evaluation": ROOT / "evaluation"}
ROOMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # its modules; whence it imports, beside "common"
    "common": (
        (
            "errors",
            "threads",
            "version",
            "plugins",
            "config",
            "recipes",
            "tenants",
            "model_names",
            "store.chunk",
            "store.nibbles",
            "model.cache_keyword",
        ),
        (),
    ),
    "rotary": (("rotary",), ()),
    "selectors": (("selectors",), ()),
    "correctors": (("correctors",), ()),
    "tiers": (("store.tiers",), ()),
    "eviction": (("store.eviction",), ()),
    "codecs": (("store.codecs",), ()),
    "store": (("store",), ("tiers", "eviction", "codecs")),
    "prompt": (("prompt",), ("rotary",)),
    "model": (("model",), ("rotary", "prompt")),
    "chunk_store": (("chunk_store",), ("prompt", "model", "store")),
    "prefill": (("prefill",), ("rotary", "selectors", "correctors", "prompt", "model", "store", "tiers")),
    "cache": (("cache",), ("rotary", "selectors", "correctors", "prompt", "model", "store", "tiers", "prefill")),
    "generate": (("generate",), ("prompt", "model", "store", "prefill", "cache")),
    "offload": (("offload",), ("cache",)),
    "hybrids": (("hybrids",), ("selectors", "model", "prefill", "cache")),
    "loading": (("loading",), ("model", "store", "prefill", "cache")),
    "context": (("context",), ("rotary", "prompt", "model", "store", "tiers", "prefill", "cache")),
    "attending": (("sparse.methods",), ()),
    "sparse": (
        ("sparse",),
        ("offload", "attending", "rotary", "prompt", "model", "store", "tiers", "prefill", "cache"),
    ),
    "verify": (("verify",), ("rotary", "selectors", "prompt", "model", "store", "prefill", "cache")),
    "serving": (("serving",), ("prompt", "model", "store", "tiers", "prefill", "cache")),
    "integrations": (("integrations",), ("prompt", "model", "store", "cache")),
    "vllm": (("integrations.vllm",), ("prompt", "model", "store", "cache")),
    "evaluation": (("evaluation",), ("*",)),
    "cli": (("cli", "__main__"), ("*", "evaluation")),
}
DEBTS: set[tuple[str, str]] = set()  # imports against the order; all are paid off, and none may be added


def source_files() -> dict[str, Path]:
    """Dotted name → file of every module that is installed."""
    found = {}
    for package, folder in HOMES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *parts]).removesuffix(".__init__")] = path
    return found


USERS = ("evaluation", "cli")
FILES = source_files()
PLUGINS = {f"hf_blend.{kind}.{name.replace('-', '_')}" for kind in plugins.kinds() for name in plugins.describe(kind)}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree, leaving out what only type checkers see."""
    left = [tree]
    while left:
        node = left.pop()
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield node
            left.extend(ast.iter_child_nodes(node))


def imported(name: str, walk: Callable[[ast.AST], Iterator[ast.AST]] = statements) -> Iterator[tuple[str, str]]:
    """Give (module, name in it or "") for all that a module imports, with relative names made absolute."""
    package = name if FILES[name].stem == "__init__" else name.rpartition(".")[0]
    for node in walk(tree_of(FILES[name])):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner, "") if inner in FILES else (source, alias.name)


@cache
def edges(name: str) -> frozenset[str]:
    """What a module imports of the package."""
    return frozenset({module for module, _ in imported(name) if module.startswith("hf_blend")} - {name})


def inner(name: str) -> str:
    """A module's name without the package's."""
    return name.removeprefix("hf_blend").lstrip(".")


def belongs(name: str, entry: str) -> bool:
    """Whether a module is what an entry of ROOMS names, or inside it."""
    return f"{inner(name)}.".startswith(f"{entry}.")


@cache
def room(name: str) -> str:
    """The room with the longest entry that a module belongs to; the package itself is in none."""
    entries = {entry: room for room, (modules, _) in ROOMS.items() for entry in modules if belongs(name, entry)}
    return entries[max(entries, key=len)] if entries else ""


def may_import(name: str, target: str) -> bool:
    """Whether the order lets one module import another; inside a room there is no order, only no circle."""
    here, there = room(name), room(target)
    allowed = {"common", here, *ROOMS[here][1]}
    return there in allowed or ("*" in allowed and there not in USERS)


MODULES = sorted(set(FILES) - {"hf_blend"})


def test_every_module_has_its_room():
    assert not [name for name in MODULES if not room(name)], "say in ROOMS where it is"
    entries = [entry for modules, _ in ROOMS.values() for entry in modules]
    assert not [entry for entry in entries if not any(belongs(name, entry) for name in MODULES)], "in no tree"


def test_rooms_import_one_way():
    list(TopologicalSorter({room: set(above) for room, (_, above) in ROOMS.items()}).static_order())
    pairs = [(name, target) for name in MODULES for target in edges(name) - {"hf_blend"}]
    against = {(inner(name), inner(target)) for name, target in pairs if not may_import(name, target)}
    assert not against - DEBTS, "imported against the order of ROOMS, be it inside a function"
    assert not DEBTS - against, f"paid off: take out of DEBTS {DEBTS - against}"


CORE = ("rotary", "selectors", "correctors", "prompt", "model", "prefill", "cache", "loading")


def test_no_constructor_of_the_core_takes_more_than_six_arguments():
    """What belongs together is one record, such as `PrefillContext`; records themselves are no constructors here."""
    many = {}
    for name in (name for name in MODULES if room(name) in CORE):
        for kind in (node for node in ast.walk(tree_of(FILES[name])) if isinstance(node, ast.ClassDef)):
            for made in (one for one in kind.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
                taken = made.args
                given = [*taken.posonlyargs, *taken.args[1:], *taken.kwonlyargs, taken.vararg, taken.kwarg]
                if (count := sum(one is not None for one in given)) > 6:
                    many[f"{name}.{kind.name}"] = count
    assert not many


def test_no_module_knows_a_method_by_its_file():
    known = {name: edges(name) & PLUGINS for name in MODULES if edges(name) & PLUGINS}
    assert not known, "load it by name with hf_blend.plugins"


def test_no_two_modules_import_each_other_even_the_long_way_round():
    """Nor where only type checkers look."""
    graph = {name: {module for module, _ in imported(name, ast.walk)} & {*FILES} - {name} for name in FILES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_the_library_does_not_take_its_own_names_from_the_lazy_package():
    library = [name for name in MODULES if room(name) not in USERS]
    assert not [(name, what) for name in library for module, what in imported(name) if module == "hf_blend"]


def test_the_command_and_the_evaluation_use_public_names_only():
    def private(name):
        foreign = [pair for pair in imported(name) if pair[0].startswith("hf_blend") and room(pair[0]) != room(name)]
        return [pair for pair in foreign if any(re.search(r"(^|\.)_(?!_)", part) for part in pair)]

    assert not [(name, private(name)) for name in MODULES if room(name) in USERS and private(name)]


LIGHT = {
    "import hf_blend": ("torch", "transformers", "numpy", "huggingface_hub", "typer", "rich"),
    "from hf_blend import BlendConfig, ConfigError; BlendConfig().ratios(4)": ("torch", "transformers", "numpy"),
    "from hf_blend import plugins; [plugins.describe(kind) for kind in plugins.kinds()]": ("torch", "transformers"),
    "from hf_blend.cli.main import build; build(['--help'])": ("torch", "transformers", "numpy", "rich"),
    "import hf_blend.evaluation": ("torch", "transformers", "datasets", "evaluate"),
}


def test_light_imports_leave_heavy_packages_alone_and_change_nothing_outside():
    state = "[sys.path[:], sys.meta_path[:], dict(os.environ), warnings.filters[:], logging.root.handlers[:]]"
    code = f"import logging, os, sys, warnings\nbefore = {state}\nimport hf_blend\nassert before == {state}\n"
    for statement, heavy in LIGHT.items():  # one after another, in one process
        code += f"{statement}\nprint(*({statement!r} + ': ' + m for m in {heavy} if m in sys.modules))\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", hf_blend.__all__)
def test_every_public_name_can_be_imported_and_is_listed(name):
    assert getattr(hf_blend, name) is not None
    assert name in dir(hf_blend)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'hf_blend' has no attribute 'BlendCash'"):
        _ = hf_blend.BlendCash
