# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page docs/reference.md, written from the docstrings of the public words.

python docs/build/api.py
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_blend
from hf_blend import plugins

ROOT = Path(__file__).resolve().parents[2]
INNER = {  # methods that the page shows with their arguments
    "BlendCache": ("inputs", "inputs_from_messages", "inputs_from_text", "inputs_with_images", "heal", "to_static"),
    "ChunkStore": ("open", "add"),
    "StateCache": ("prefill", "generate"),
}
LISTED = {  # methods and properties that it shows in a line
    "BlendCache": ("crop",),
    "ChunkStore": ("find", "get", "put", "contains", "delete", "prefetch", "flush", "close"),
    "SequenceCache": ("remove", "copy", "keep", "shift", "divide", "recompute", "tokens", "positions"),
    "BlendConfig": ("to_json", "from_dict"),
}
ELSEWHERE = ("rotary", "selectors", "evaluation.methods", "evaluation.scores", "store.codecs", "store.tiers")
METHODS = "## Methods by name\n\nSelectors: [all rules](rules.md). Codecs and tiers: `ChunkStore.open`.\n"
HEAD = """# Reference

Made from the docstrings by `python docs/build/api.py`. `import hf_blend` costs nothing: each name is
imported when it is first used.
"""


def reference() -> str:
    """The whole page."""
    names = [name for name in hf_blend.__all__ if not name.startswith("__")]
    errors = [name for name in names if name.endswith("Error")]
    parts = [HEAD, *(_word(name) for name in names if name not in errors), "## Errors\n", _errors(errors)]
    parts += [
        "## `cache.report`\n",
        _report(),
        METHODS,
        *(_kind(kind) for kind in plugins.kinds() if kind not in ELSEWHERE),
    ]
    return "\n".join(parts).rstrip() + "\n"


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
    lines = [f"## `{name}`\n", f"{summary(word)}\n"]
    if not inspect.isclass(word):
        return "\n".join([*lines, *_arguments(word)])
    if found := list(entries(word, "Attributes")):
        lines += [*_list(found), ""]
    else:
        lines += _arguments(word.__init__)
    if listed := LISTED.get(name, ()):
        lines += ["Methods:\n", *_list((inner, summary(getattr(word, inner))) for inner in listed), ""]
    for inner in INNER.get(name, ()):
        lines += [f"### `{name}.{inner}`\n", f"{summary(getattr(word, inner))}\n", *_arguments(getattr(word, inner))]
    return "\n".join(lines)


def _arguments(function: Any) -> list[str]:
    lines = _list(entries(function, "Args"))
    for section in ("Returns", "Yields"):
        text = " ".join(f"{name}: {meaning}".rstrip(": ") for name, meaning in entries(function, section))
        lines += [f"\n{section}: {text}"] if text else []
    return [*lines, ""] if lines else []


def _list(found: Any) -> list[str]:
    return [f"* `{name}`: {meaning}" for name, meaning in found]


def _errors(names: list[str]) -> str:
    return "\n".join([*_list((name, summary(getattr(hf_blend, name))) for name in names), ""])


def _report() -> str:
    from hf_blend.prefill.report import BlendReport

    derived = [(name, summary(getattr(BlendReport, name))) for name in ("flops", "charged_budget", "flop_bound")]
    return "\n".join([*_list([*entries(BlendReport, "Attributes"), *derived]), ""])


def _kind(kind: str) -> str:
    lines = [f"### `{kind}`\n"]
    return "\n".join([*lines, *_list(plugins.describe(kind).items()), ""])


def main() -> None:
    """Write the page."""
    (ROOT / "docs" / "reference.md").write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
