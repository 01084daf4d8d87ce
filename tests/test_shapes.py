# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Classes stay small: what each sets on itself and defines is counted, and a number only falls.

To watch another class, add a line to `MOST`: its file, its name, and the numbers that it has now. A class counts with
the classes that derive from it in the package, but for what they only override.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "hf_blend"


class Shape(NamedTuple):
    attributes: int  # set on `self` in any method
    methods: int  # properties and private ones included


MOST = {
    ("cache/blend_cache.py", "BlendCache"): Shape(15, 26),
    ("cache/forward_watch.py", "ForwardWatch"): Shape(7, 12),
    ("prefill/blend.py", "Prefill"): Shape(28, 21),
}


def body(tree, name):
    """The body of a class."""
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def methods(cls):
    return {node.name for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def attributes(cls):
    """What is assigned to `self`, in every method, and in functions inside of these; in tuples and loops, too."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


@cache
def classes():
    """Name → the classes of the package that are called so."""
    by_name = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(node)
    return by_name


def derived(name):
    """The classes of the package that derive from one of this name, directly or not."""
    children = [
        node
        for nodes in classes().values()
        for node in nodes
        if any(isinstance(base, ast.Name) and base.id == name for base in node.bases)
    ]
    return [*children, *(node for child in children for node in derived(child.name))]


def shape_of(file, name):
    family = [body(ast.parse((ROOT / file).read_text("utf-8")), name), *derived(name)]
    return Shape(len(set().union(*map(attributes, family))), len(set().union(*map(methods, family))))


@pytest.mark.parametrize(("file", "name"), MOST, ids=lambda value: value if "/" not in value else "")
def test_class_sets_and_defines_no_more_than_it_did(file, name):
    now, most = shape_of(file, name), MOST[file, name]
    assert now.attributes <= most.attributes, "group what belongs together into an object of its own"
    assert now.methods <= most.methods, "move what another object can do to it"


def test_no_class_hands_its_attributes_to_a_function_that_sets_them():
    """A count would not see `setattr(self, …)` or `vars(self).update(…)`."""
    for file, name in MOST:
        nodes = ast.walk(body(ast.parse((ROOT / file).read_text("utf-8")), name))
        calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        on_self = [node for node in calls if node.args and ast.unparse(node.args[0]) == "self"]
        assert not {"setattr", "vars"} & {node.func.id for node in on_self}, name


def test_every_way_to_set_an_attribute_is_counted():
    text = """
class Parent:
    def __init__(self):
        self.a, (self.b, *self.c) = self.d, other.e
        self.f: int = 0
        self.g += 1
    @property
    def h(self):
        for self.i in (): pass
        with open() as self.j: pass
        self.k.l = 1
        def inner(): self.m = (n := 1)
    async def o(self): pass
"""
    cls = body(ast.parse(text), "Parent")
    assert attributes(cls) == set("abcfgijm")
    assert methods(cls) == {"__init__", "h", "o"}
