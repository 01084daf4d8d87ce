# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The house style, as far as a machine can check it."""

import ast
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.source import PACKAGE, ROOT, nodes_of, tree_of

BESIDE = ("tests", "examples", "benchmarks", "app", "docs/build")
AROUND = [p for room in BESIDE for p in sorted((ROOT / room).rglob("*.py"))]
HEADER = ["# SPDX-FileCopyrightText: 2026 The hf_blend authors", "# SPDX-License-Identifier: Apache-2.0"]
MAX_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 50, 9
FOREIGN_ERRORS = {"Exception", "ValueError", "KeyError", "RuntimeError", "ImportError", "LookupError"}
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(?:home|root|mnt|work|Users|tmp)/\w+")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Give the public functions, classes and methods of a module, with their dotted names."""
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield prefix + child.name, child
            if isinstance(child, ast.ClassDef):
                yield from public(child, f"{prefix}{child.name}.")


def functions(path: Path) -> list[Function]:
    return [node for node in nodes_of(path) if isinstance(node, Function)]


def code_lines(function: Function) -> int:
    """Lines of a function without its decorators and docstring."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def offenders(paths: list[Path], find: Callable[[Path], Any]) -> dict[str, Any]:
    """What `find` has to say about each file, without those about which it has nothing."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := find(path))}


def raised(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Give the class name and the call of each `raise Name(…)`."""
    for node in nodes_of(path):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func).rpartition(".")[2], node.exc


def test_every_file_begins_with_its_licence_and_says_what_it_is_for():
    def headless(path):
        lines = path.read_text("utf-8").splitlines()
        first = lines[lines[0].startswith("#!") :][:3]
        return first[:2] != HEADER or not first[2].startswith(('"""', 'r"""'))

    assert not offenders(PACKAGE + AROUND, headless)


def test_few_functions_are_longer_than_a_screen():
    lines = [code_lines(function) for path in PACKAGE for function in functions(path)]
    assert sum(one > MAX_FUNCTION_LINES for one in lines) <= 0.005 * len(lines)


def test_the_median_function_is_short():
    assert statistics.median(code_lines(node) for path in PACKAGE for node in functions(path)) <= MEDIAN_FUNCTION_LINES


def test_whatever_is_public_is_documented():
    def undocumented(path):
        return [name for name, node in public(tree_of(path)) if not ast.get_docstring(node)]

    assert not offenders(PACKAGE, undocumented)


def test_every_argument_and_result_is_typed():
    def untyped(function):
        of = function.args
        arguments = [*of.posonlyargs, *of.args, *of.kwonlyargs, *filter(None, [of.vararg, of.kwarg])]
        bare = [one.arg for one in arguments if one.annotation is None and one.arg not in ("self", "cls")]
        return bare or function.returns is None

    assert not offenders(PACKAGE, lambda path: [(f.name, f.lineno) for f in functions(path) if untyped(f)])


def test_input_is_not_checked_by_assert():
    def asserts(path):
        return [node.lineno for node in nodes_of(path) if isinstance(node, ast.Assert)]

    assert not offenders(PACKAGE, asserts), "raise one of hf_blend.errors"


def test_nothing_is_printed_or_evaluated():
    def calls(path):
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        names = [(node.func.id, node.lineno) for node in nodes if isinstance(node.func, ast.Name)]
        return [name for name in names if name[0] in ("print", "eval", "exec")]

    assert not offenders(PACKAGE, calls)


def reads(handler: ast.ExceptHandler) -> Callable[[ast.AST], bool]:
    """Whether a node raises something, or looks at the exception that was caught."""
    return lambda node: isinstance(node, ast.Raise) or (isinstance(node, ast.Name) and node.id == handler.name)


def test_no_error_is_swallowed_unread():
    def silent(path):
        handlers = [node for node in nodes_of(path) if isinstance(node, ast.ExceptHandler)]
        broad = [
            one for one in handlers if one.type is None or ast.unparse(one.type) in ("Exception", "BaseException")
        ]
        return [one.lineno for one in broad if not any(map(reads(one), ast.walk(one)))]

    assert not offenders(PACKAGE, silent)


def test_errors_that_reach_the_user_are_ours():
    def foreign(path):
        private = [node for node in functions(path) if re.match(r"_(?!_)", node.name)]
        caught_nearby = {id(inner) for node in private for inner in ast.walk(node)}
        calls = [(name, call.lineno) for name, call in raised(path) if id(call) not in caught_nearby]
        return [call for call in calls if call[0] in FOREIGN_ERRORS]

    assert not offenders(PACKAGE, foreign), "raise one of hf_blend.errors, which are also the built-in ones"


def has_words(error: ast.Call) -> bool:
    """Whether a message is written where it is raised, not handed on."""
    words = (node.value for node in ast.walk(error) if isinstance(node, ast.Constant))
    return any(isinstance(word, str) and " " in word for word in words)


def says_the_value(error: ast.Call) -> bool:
    """Whether a message holds something that is not known before the program runs; a CONSTANT or a type is."""
    for part in (node.value for node in ast.walk(error) if isinstance(node, ast.FormattedValue)):
        called = {id(node.func) for node in ast.walk(part) if isinstance(node, ast.Call)}
        names = [node for node in ast.walk(part) if isinstance(node, ast.Name) and id(node) not in called]
        own = any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(part))
        if own or any(not name.id.isupper() for name in names):
            return True
    return False


def test_nine_in_ten_error_messages_say_the_value():
    calls = [(path.name, call) for path in PACKAGE for _, call in raised(path) if has_words(call)]
    calls = [(name, call) for name, call in calls if ast.unparse(call.func) != "EntryFault"]  # a counter's reason
    silent = [f"{name}: {ast.unparse(call)}" for name, call in calls if not says_the_value(call)]
    assert len(silent) <= len(calls) / 10, "\n".join(silent)


def text_files() -> list[Path]:
    """All that is written by hand, where it is small enough to be."""
    kinds = {".py", ".md", ".cfg", ".toml", ".txt", ".sh", ""}
    rooms = ["hf_blend", "cli", "evaluation", "tests", "examples", "benchmarks", "app", "model_cards", ".ci"]
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if "__pycache__" not in path.parts]
    files += [path for path in ROOT.iterdir() if path.name == ".gitignore" or not path.name.startswith(".")]
    return sorted(path for path in files if path.is_file() and path.suffix in kinds and path.stat().st_size < 200_000)


def test_no_file_speaks_of_one_machine():
    assert not offenders(text_files(), lambda path: MACHINE_PATH.findall(path.read_text("utf-8", errors="replace")))
