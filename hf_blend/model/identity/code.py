# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which code a model runs: names of functions and classes, and functions that were put into a class or a module.

Code of the libraries counts by its name, other code by the file that it comes from. A function that no file has under
its name (a lambda, a closure, a function of a notebook) counts as itself, and is known in this process alone.
"""

import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, ModuleType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, finalize

from ...errors import UnsupportedModelError

LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft", "torchao", "hf_blend")
BUILTINS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, type(object.__init__))
_PYTHON, _SITES = (f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen"), ("site-packages", "dist-packages")
_WITH_CODE = frozenset({FunctionType, property, classmethod, staticmethod})
_own_names: dict[int, str] = {}  # by the ids of objects that live
_names: MutableMapping[Any, list[str]] = WeakKeyDictionary()
_patches: MutableMapping[Any, tuple[dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()


def is_library(module: str | None) -> bool:
    """Whether a dotted module name belongs to a library whose code is known by name."""
    return (module or "").partition(".")[0] in LIBRARIES


def qualified_name(value: Any) -> str:
    """Module and name of a function or class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_stock(function: Any, home: str = "") -> bool:
    """Whether a function, and all that it wraps, was compiled from a library, from Python's own or a module's file.

    A wrapper may copy every name of what it wraps, but not the file.
    """
    own = getattr(sys.modules.get(home), "__file__", None)
    while isinstance(function, FunctionType):
        file = function.__code__.co_filename
        is_python = file.startswith(_PYTHON) and not any(name in file for name in _SITES)
        if not (is_python or file == own or file.startswith(_folders())):
            return False
        function = getattr(function, "__wrapped__", None)
        function = getattr(function, "__func__", function)
    return function is None or isinstance(function, BUILTINS)


@functools.cache
def _folders() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, LIBRARIES)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in specs if spec and spec.origin)


def function_name(function: Any) -> str | list[str]:
    """A function as a value of JSON: its name if a library has it, else with a digest of its file."""
    return qualified_name(function) if is_stock(function) else _foreign_name(function)


def class_name(kind: type) -> list[Any]:
    """A class as a value of JSON: its name and, of its bases, the files of foreign ones and the patches of all."""
    described: list[Any] = [qualified_name(kind) if is_library(kind.__module__) else kind.__qualname__]
    for base in kind.__mro__:
        if is_library(base.__module__):
            described += [[qualified_name(base), patches(base)]] if patches(base) else []
        elif base.__module__.partition(".")[0] not in sys.stdlib_module_names:
            described.append([*_foreign_name(base), patches(base)])
    return described


def module_name(module: ModuleType) -> list[str]:
    """A module as a value of JSON: its name and, if it is no library's and not Python's own, a digest of its file."""
    file = getattr(module, "__file__", None)
    is_known = is_library(module.__name__) or module.__name__.partition(".")[0] in sys.stdlib_module_names
    return [
        module.__name__,
        *([] if is_known or file is None else [hashlib.sha256(Path(file).read_bytes()).hexdigest()]),
    ]


def own_name(value: Any, path: str) -> list[str]:
    """An object that cannot be read, as a value of JSON: itself, which is known in this process alone.

    Raises:
        UnsupportedModelError: it cannot be kept apart from others either.
    """
    kind = qualified_name(type(value))
    try:
        if id(value) not in _own_names:
            finalize(value, _own_names.pop, id(value))
            _own_names[id(value)] = uuid4().hex
        return [kind, _own_names[id(value)]]
    except TypeError as error:
        raise UnsupportedModelError(
            f"{path} is a {kind}, in which nothing can be read, so the model cannot be told from another. Keep it "
            "outside the model, or in a class with attributes."
        ) from error


def patches(space: type | ModuleType) -> dict[str, Any]:
    """By name, the functions in a class or a module that were compiled from another file than its own.

    The model's code looks functions up there, so one that was put in changes what the model computes.
    """
    members = {name: member for name, member in vars(space).items() if type(member) in _WITH_CODE}
    if space not in _patches or _patches[space][0] != members:
        _patches[space] = members, _find_patches(space, members)
    return _patches[space][1]


def _find_patches(space: type | ModuleType, members: dict[str, Any]) -> dict[str, Any]:
    is_class = isinstance(space, type)
    home, prefix = (space.__module__, f"{space.__qualname__}.") if is_class else (space.__name__, "")
    put = dict[str, Any]()
    for name, member in members.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not isinstance(function, FunctionType):
            continue
        is_moved = name == "forward" and not function.__qualname__.endswith((prefix + name, "_unimplemented"))
        if is_moved or not is_stock(function, home):
            put[f"{home}.{prefix}{name}" if is_library(home) else prefix + name] = function_name(function)
    return put


def _foreign_name(value: Any) -> list[str]:
    """The name of a function or class of no library, with a digest of its file or, without a file, a random number."""
    if value not in _names:
        home = value.__module__ or ""
        reached: Any = sys.modules.get(home)
        file = getattr(reached, "__file__", None)
        for name in value.__qualname__.split("."):
            reached = getattr(reached, name, None)
        is_of_file = reached is value and (isinstance(value, type) or is_stock(value, home))
        known_by = hashlib.sha256(Path(file).read_bytes()) if is_of_file and file and os.path.exists(file) else None
        _names[value] = [value.__qualname__, known_by.hexdigest() if known_by else uuid4().hex]
    return _names[value]
