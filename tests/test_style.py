# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The house style, as far as a machine can check it."""

import ast
import re
import statistics
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = [path for room in ("hf_blend", "cli", "evaluation") for path in sorted((ROOT / room).rglob("*.py"))]
AROUND = [p for room in ("tests", "examples", "benchmarks", "app") for p in sorted((ROOT / room).rglob("*.py"))]
HEADER = ["# SPDX-FileCopyrightText: 2026 The hf_blend authors", "# SPDX-License-Identifier: Apache-2.0"]
MAX_FILE_LINES, WARN_FILE_LINES = 300, 260
MAX_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 50, 9
FOREIGN_ERRORS = {"Exception", "ValueError", "KeyError", "RuntimeError", "ImportError", "LookupError"}
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|mnt|work|Users|tmp)/\w+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Give the public functions, classes and methods of a module, with their dotted names."""
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, Function)]


def code_lines(function: Function) -> int:
    """Lines of a function without its decorators and docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


@each(PACKAGE + AROUND)
def test_a_file_begins_with_its_licence_and_says_what_it_is_for(path):
    lines = path.read_text("utf-8").splitlines()
    assert lines[lines[0].startswith("#!") :][:2] == HEADER
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@each(PACKAGE)
def test_a_file_fits_the_head(path):
    lines = len(path.read_text("utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{name_of(path)} has {lines} lines: give a part of it its own file"
    if lines > WARN_FILE_LINES:
        warnings.warn(f"{name_of(path)} has {lines} lines", stacklevel=1)


@each(PACKAGE)
def test_no_function_is_longer_than_a_screen(path):
    long = {node.name: code_lines(node) for node in functions(path) if code_lines(node) > MAX_FUNCTION_LINES}
    assert not long


def test_the_median_function_is_short():
    assert statistics.median(code_lines(node) for path in PACKAGE for node in functions(path)) <= MEDIAN_FUNCTION_LINES


@each(PACKAGE)
def test_whatever_is_public_is_documented(path):
    assert not [name for name, node in public(tree_of(path)) if not ast.get_docstring(node)]


@each(PACKAGE)
def test_every_argument_and_result_is_typed(path):
    untyped = set()
    for node in functions(path):
        of = node.args
        arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
        bare = [one.arg for one in arguments if one.annotation is None and one.arg not in ("self", "cls")]
        if bare or node.returns is None:
            untyped.add((node.name, node.lineno, *bare))
    assert not untyped


@each(PACKAGE)
def test_input_is_not_checked_by_assert_and_nothing_is_printed(path):
    nodes = list(ast.walk(tree_of(path)))
    asserts = [node.lineno for node in nodes if isinstance(node, ast.Assert)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert not asserts, f"assert at lines {asserts}: raise one of hf_blend.errors"
    assert not [node.lineno for node in calls if node.func.id in ("print", "eval", "exec")]


@each(PACKAGE)
def test_no_error_is_swallowed_unread(path):
    handlers = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)]
    broad = [one for one in handlers if one.type is None or "Exception" in ast.unparse(one.type).split()]
    silent = [one.lineno for one in broad if not any(isinstance(inner, ast.Raise) for inner in ast.walk(one))]
    assert not silent, f"{name_of(path)} catches everything at lines {silent} and goes on"


def raised(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Give the class name and the call of each `raise Name(…)`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func).rpartition(".")[2], node.exc


@each(PACKAGE)
def test_errors_that_reach_the_user_are_ours(path):
    private = [node for node in functions(path) if re.match(r"_(?!_)", node.name)]
    caught_nearby = {id(inner) for node in private for inner in ast.walk(node)}
    calls = [(name, call.lineno) for name, call in raised(path) if id(call) not in caught_nearby]
    foreign = [call for call in calls if call[0] in FOREIGN_ERRORS]
    assert not foreign, f"{foreign}: raise one of hf_blend.errors, which are also the built-in ones"


def test_nine_in_ten_error_messages_say_the_value():
    calls = [call for path in PACKAGE for name, call in raised(path) if name.endswith("Error") and call.args]
    silent = [call for call in calls if isinstance(call.args[0], ast.Constant)]
    share = 1 - len(silent) / len(calls)
    assert share >= 0.9, [ast.unparse(call) for call in silent]


def text_files() -> list[Path]:
    """All that is written by hand, where it is small enough to be."""
    kinds = {".py", ".md", ".cfg", ".toml", ".txt", ".sh", ""}
    rooms = ["hf_blend", "cli", "evaluation", "tests", "examples", "benchmarks", "app", "model_cards", ".ci"]
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if "__pycache__" not in path.parts]
    files += [path for path in ROOT.iterdir() if path.name == ".gitignore" or not path.name.startswith(".")]
    return sorted(path for path in files if path.is_file() and path.suffix in kinds and path.stat().st_size < 200_000)


@each(text_files())
def test_no_file_speaks_of_one_machine(path):
    found = [match.group() for match in MACHINE_PATH.finditer(path.read_text("utf-8", errors="replace"))]
    assert not found, f"{name_of(path)} names {found}"
