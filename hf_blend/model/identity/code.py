# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which code a model runs: names of functions and classes, and what was put into a class or a module.

Code of the libraries counts by its name, other code by the file that it comes from. A function that no file has under
its name (a lambda, a closure, a function of a notebook) counts as itself, and is known in this process alone.
"""

import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import MutableMapping
from operator import is_, itemgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType, ModuleType
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary, finalize

from ...errors import UnsupportedModelError

LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft", "torchao", "hf_blend")
BUILTINS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, type(object.__init__))
_PYTHON, _SITES = (f"{os.path.dirname(os.__file__)}{os.sep}", "<frozen"), ("site-packages", "dist-packages")
_SLOTS = (types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)
_CALLING = (functools.partial, MethodType)
_PLAIN = frozenset({type, str, bytes, bool, int, float, tuple, list, dict, set, frozenset, type(None)})
_own_names: dict[int, str] = {}  # by the ids of objects that live
_names: MutableMapping[Any, list[str]] = WeakKeyDictionary()
_contents: MutableMapping[Any, "Contents"] = WeakKeyDictionary()


class Contents(NamedTuple):
    """What was put into a class or a module: the model's code looks it up there, so it changes what is computed.

    Attributes:
        members: all that may be code, by name.
        patches: functions that were compiled from another file than the class or module, as values of JSON.
        objects: what is no function but runs as one, of which a library has none itself; in other classes all values
            but those of Python's plain types.
    """

    members: dict[str, Any]
    patches: dict[str, Any]
    objects: dict[str, Any]


def is_library(module: str | None) -> bool:
    """Whether a dotted module name belongs to a library whose code is known by name."""
    return (module or "").partition(".")[0] in LIBRARIES


def own_bases(kind: type) -> list[type]:
    """Those of a class and its bases that are of no library and not of Python itself."""
    return [base for base in _bases(kind) if not is_library(base.__module__)]


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
    return class_and_values(kind, {})[0]


def class_and_values(kind: type, seen: dict[type, Contents]) -> tuple[list[Any], list[tuple[str, Any]]]:
    """A class by its `class_name`, and with their names the values in it and in its bases that are no functions.

    `seen`: the classes that were looked into in this walk; others are added.
    """
    described: list[Any] = [qualified_name(kind) if is_library(kind.__module__) else kind.__qualname__]
    values = list[tuple[str, Any]]()
    for base in _bases(kind):
        contents = seen[base] = seen.get(base) or contents_of(base)
        if not is_library(base.__module__):
            described.append([*_foreign_name(base), contents.patches])
            plain = [item for item in vars(base).items() if type(item[1]) in _PLAIN and not _is_special(item[0])]
            values += [(f"{base.__qualname__}.{name}", value) for name, value in plain]
        elif contents.patches:
            described.append([qualified_name(base), contents.patches])
        if contents.objects:
            values += [(f"{base.__qualname__}.{name}", value) for name, value in contents.objects.items()]
    return described, sorted(values, key=itemgetter(0))


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


def own_words(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Those names that are in the files of the own bases of a class; all, where a file is unknown."""
    sources = [_source(base) for base in own_bases(kind)]
    words = re.findall(rb"\w+", b" ".join(source or b"" for source in sources))
    return names if None in sources else names.intersection(word.decode(errors="replace") for word in words)


def contents_of(space: type | ModuleType) -> Contents:
    """What a class or a module has now; it is looked into again where something in it was replaced."""
    members = {name: member for name, member in vars(space).items() if type(member) not in _PLAIN}
    contents = _contents.get(space) or Contents({}, {}, {})
    before = contents.members
    if len(before) != len(members) or not all(map(is_, map(before.get, members), members.values())):
        contents = _contents[space] = _look_into(space, members)
    return contents


def _look_into(space: type | ModuleType, members: dict[str, Any]) -> Contents:
    is_class = isinstance(space, type)
    home, prefix = (space.__module__, f"{space.__qualname__}.") if is_class else (space.__name__, "")
    is_of_library, put, run = is_library(home), dict[str, Any](), dict[str, Any]()
    for name, member in members.items():
        function = member.fget if type(member) is property else member
        function = member.__func__ if type(member) in (classmethod, staticmethod) else function
        is_special = _is_special(name)
        may_run = not isinstance(function, type) and (callable(function) or hasattr(type(function), "__get__"))
        if isinstance(function, FunctionType):
            is_moved = not function.__qualname__.endswith((prefix + name, "_unimplemented"))
            if (is_moved and name == "forward") or not is_stock(function, home):
                put[f"{home}.{prefix}{name}" if is_of_library else prefix + name] = function_name(function)
            elif is_moved and is_class and not is_of_library:
                put[prefix + name] = [function.__qualname__, function.__code__.co_firstlineno]
        elif function is None or isinstance(function, (*_SLOTS, *BUILTINS) if is_special else _SLOTS):
            continue
        elif not is_of_library:
            run |= {name: function} if is_class and (may_run or not is_special) else {}
        elif may_run and (is_class or isinstance(function, _CALLING) or own_bases(type(function))):
            run[name] = function
    return Contents(members, put, run)


def _bases(kind: type) -> list[type]:
    """A class and its bases, but those of Python itself."""
    return [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in sys.stdlib_module_names]


def _is_special(name: str) -> bool:
    """Whether a name in a class is Python's own, or tells how transformers loads the class."""
    return name in ("_abc_impl", "_auto_class") or (name.startswith("__") and name.endswith("__"))


def _foreign_name(value: Any) -> list[str]:
    """The name of a function or class of no library, with a digest of its file or, without a file, a random number."""
    if value not in _names:
        source = _source(value)
        _names[value] = [value.__qualname__, uuid4().hex if source is None else hashlib.sha256(source).hexdigest()]
    return _names[value]


def _source(value: Any) -> bytes | None:
    """The file that has a function or class under its name; None where no file has."""
    home = value.__module__ or ""
    reached: Any = sys.modules.get(home)
    file = getattr(reached, "__file__", None)
    for name in value.__qualname__.split("."):
        reached = getattr(reached, name, None)
    is_of_file = reached is value and (isinstance(value, type) or is_stock(value, home))
    return Path(file).read_bytes() if is_of_file and file and os.path.exists(file) else None
