# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The classes of a store have one task each: their attributes, methods and lines only become fewer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "hf_blend"
MOST = {  # attributes, methods, lines
    ("store/store.py", "BaseStore"): (9, 35, 257),
    ("store/reader.py", "Reader"): (3, 8, 93),
    ("store/reader.py", "RecordedSource"): (5, 4, 29),
    ("store/reader.py", "LateLoads"): (1, 2, 19),
    ("store/stream.py", "StreamReader"): (4, 2, 24),
    ("store/stream.py", "StreamedLayers"): (11, 11, 107),
    ("store/stream.py", "_Stream"): (8, 5, 44),
    ("store/writer.py", "Writer"): (3, 7, 85),
    ("store/write_queue.py", "WriteQueue"): (10, 15, 139),
    ("store/admin.py", "StoreAdmin"): (1, 16, 161),
    ("store/storage.py", "Storage"): (11, 9, 87),
    ("chunk_store.py", "ChunkStore"): (1, 12, 240),
    ("sparse/partial/reader.py", "PartialReader"): (8, 8, 80),
    ("sparse/partial/layers.py", "PartialLayers"): (6, 9, 77),
}
MOST_LINES = {"Index": 431}  # of any class; 300 of those that are not listed


def classes(path: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def lines(tree: ast.ClassDef) -> int:
    return (tree.end_lineno or 0) - tree.lineno + 1


def shape(tree: ast.ClassDef) -> tuple[int, int, int]:
    """How many attributes the methods of a class set on `self`, how many methods it has, and its lines."""
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    return len(attributes), sum(isinstance(node, ast.FunctionDef) for node in tree.body), lines(tree)


@pytest.mark.parametrize(("path", "name"), MOST)
def test_a_class_of_the_store_does_not_grow(path, name):
    counts = shape(classes(path)[name])
    assert all(count <= most for count, most in zip(counts, MOST[path, name], strict=True)), counts


def test_no_class_of_the_store_is_longer_than_three_hundred_lines():
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "store").rglob("*.py")]
    found = {name: lines(tree) for path in paths for name, tree in classes(path).items()}
    assert not {name: count for name, count in found.items() if count > MOST_LINES.get(name, 300)}


def test_all_ways_of_setting_an_attribute_are_counted():
    source = "class A:\n def f(self):\n  self.a, other.b = 1, 2\n  self.c: int = 1\n  self.d += self.g\n  self.e.f = 1"
    assert shape(ast.parse(source).body[0]) == (3, 1, 6)
