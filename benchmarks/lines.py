# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Statements of Python by room, and expressions in each: packing lines saves no statement and makes them denser.

python benchmarks/lines.py
"""

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("hf_blend", "cli", "evaluation", "tests", "benchmarks")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Size:
    """What some files hold, docstrings and annotations left out."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    expressions: int = 0

    def add(self, other: "Size") -> None:
        """Count the files of another, too."""
        self.files += other.files
        self.lines += other.lines
        self.statements += other.statements
        self.expressions += other.expressions

    @property
    def density(self) -> float:
        """Expressions a statement."""
        return self.expressions / max(1, self.statements)


def without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a module, class or function without its docstring, or the `...` of an empty one."""
    first = body[0] if body else None
    is_constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_constant else body


def strip(tree: ast.Module) -> None:
    """Take docstrings and annotations out of a tree."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED):
            node.body = without_docstring(node.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)


def size_of(text: str) -> Size:
    """Return the size of one file."""
    tree = ast.parse(text)
    strip(tree)
    size = Size(files=1, lines=len(text.splitlines()))
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            size.statements += 1
        if isinstance(node, ast.expr):
            size.expressions += 1
    return size


def room_of(path: Path) -> str:
    """Return the room of a file: a folder of the library, or else one at the top."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "hf_blend":
        return parts[0]
    return f"hf_blend/{parts[1]}" if len(parts) > 2 else "hf_blend/(top)"


def sizes() -> dict[str, Size]:
    """Return the size of each room, and of the library as a whole."""
    rooms: dict[str, Size] = defaultdict(Size)
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):  # links are not followed: cli and evaluation count once
            size = size_of(path.read_text("utf-8"))
            rooms[room_of(path)].add(size)
            if top == "hf_blend":
                rooms["hf_blend"].add(size)
    return dict(sorted(rooms.items()))


def main() -> None:
    """Print a table."""
    print(f"{'room':24}{'files':>7}{'lines':>9}{'statements':>12}{'expressions a statement':>26}")
    for room, size in sizes().items():
        print(f"{room:24}{size.files:>7}{size.lines:>9,}{size.statements:>12,}{size.density:>26.2f}")


if __name__ == "__main__":
    main()
