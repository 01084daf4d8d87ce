# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference.md, written from the docstrings of the public words.

python docs/build/api.py
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hf_blend

ROOT = Path(__file__).resolve().parents[2]
INNER = {  # methods that the page shows with their arguments
    "ChunkStore": ("open",),
}
LISTED = {  # methods and properties that it shows in a line
    "BlendCache": ("inputs_from_messages", "inputs_from_text", "inputs", "heal", "save", "load", "crop"),
    "ChunkStore": ("add", "check", "collect", "close"),
}
WITH_FIELDS = ("BlendConfig",)  # words whose arguments or fields the page says; of the others `help` does
COMMON = {  # meanings of arguments that the page says once
    "model": "a causal language model of transformers.",
    "tokenizer": "the model's tokenizer.",
    "store": "where chunks are kept.",
}
HEAD = """# Reference

Made from docstrings; `help(name)` says more: all arguments, shapes and errors. These mean the same everywhere:
"""
ERRORS = """## Errors

Each is an `HfBlendError` and the built-in error in brackets; its message says what to do:"""
# Seldom asked for
SKIPPED = (
    *("realign_ms", "select_ms", "compute_ms", "store_ms"),
    *("advice", "sparse", "partial", "loaded_chunks", "notice"),
)


def reference() -> str:
    """The whole page."""
    names = [name for name in hf_blend.__all__ if not name.startswith("__")]
    errors = [name for name in names if name.endswith("Error")]
    parts = [HEAD, *_list(COMMON), "", *(_word(name) for name in names if name not in errors)]
    bases = ((name, getattr(hf_blend, name).__bases__[-1].__name__) for name in errors if name != "HfBlendError")
    parts += [ERRORS, ", ".join(f"`{name}` ({base})" for name, base in bases) + ".\n"]
    parts += ["## `cache.report`\n", _report()]
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", "\n".join(parts)).rstrip() + "\n"


def summary(documented: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def entries(documented: Any, section: str) -> Iterator[tuple[str, str]]:
    """Give name and meaning of what a docstring lists under a section such as `Args`."""
    text = inspect.getdoc(documented) or ""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    for part in re.split(r"\n(?=    \S)", found[1]) if found else []:
        name, _, meaning = " ".join(part.split()).partition(": ")
        yield name, meaning


def _word(name: str) -> str:
    word = getattr(hf_blend, name)
    lines = [f"## `{name}`\n", *_called(word, word.__init__ if inspect.isclass(word) else word)]
    if listed := LISTED.get(name, ()):
        lines += ["Methods:\n", *_list({inner: summary(getattr(word, inner)) for inner in listed}), ""]
    for inner in INNER.get(name, ()):
        lines += [f"### `{name}.{inner}`\n", *_called(getattr(word, inner), getattr(word, inner))]
    return "\n".join(lines)


def _called(word: Any, function: Any) -> list[str]:
    """How a word is called, what it is for, and its arguments or fields."""
    needed = [
        parameter.name + "=…" * (parameter.kind is parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.name != "self" and "VAR" not in parameter.kind.name
    ]
    call = f"`{word.__name__}({', '.join(needed)})`: " if needed else ""
    meanings = [*entries(word, "Attributes")] or [*entries(function, "Args")]
    lines = _list({name: meaning for name, meaning in meanings if COMMON.get(name) != meaning})
    if word.__name__ in hf_blend.__all__ and word.__name__ not in WITH_FIELDS:
        lines = []
    return [f"{call}{summary(word)}\n", *lines, *[""] * bool(lines)]


def _list(meanings: Mapping[str, str]) -> list[str]:
    return [f"* `{name}`: {meaning}" for name, meaning in meanings.items()]


def _report() -> str:
    from hf_blend.prefill.report import BlendReport

    figures = {name: meaning for name, meaning in entries(BlendReport, "Attributes") if name not in SKIPPED}
    figures |= {name: summary(getattr(BlendReport, name)) for name in ("charged_budget", "flop_bound")}
    return "\n".join([*_list(figures), ""])


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "reference.md").write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
