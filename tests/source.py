# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The project's own Python files, parsed once for all tests that read them."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {room: sorted((ROOT / room).rglob("*.py")) for room in ("hf_blend", "cli", "evaluation")}
assert all(ROOMS.values()), f"a room has no files, so its tests read nothing: {ROOMS}"
PACKAGE = [path for files in ROOMS.values() for path in files]


@cache
def tree_of(path: Path) -> ast.Module:
    """A file as it is written."""
    return ast.parse(path.read_text("utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Every node of a file."""
    return list(ast.walk(tree_of(path)))
