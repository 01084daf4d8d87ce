# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a command says: a table to people, plain lines to pipes, one JSON document to programs.

Units are read from names: `nbytes` and `…_bytes`, `…_ms`, `…_ratio`, `created` and `digest` are written for people;
JSON has the numbers as they are.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

import typer

Item = TypeVar("Item")
Row = Mapping[str, Any]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def show(
    document: Row | Sequence[Row], *, as_json: bool = False, title: str | None = None, header: bool = False
) -> None:
    """Print a command's result on stdout."""
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))
        return
    heads: Row = {}
    cells = []
    if isinstance(document, Mapping):
        for name, value in document.items():
            cells.append([name, humanise(name, value)])
    else:
        heads = document[0] if document else {}
        for row in document:
            cells.append([humanise(name, value) for name, value in row.items()])
    if sys.stdout.isatty():
        _table(heads, cells, title)
        return
    if header and heads:
        cells.insert(0, list(heads))
    for line in cells:
        typer.echo("\t".join(line))


def marked(tokens: Iterable[tuple[str, bool]]) -> str:
    """Tokens, of which some stand out on a terminal and in a pipe."""
    parts = []
    for text, stands_out in tokens:
        if not stands_out:
            parts.append(text)
            continue
        visible = text.replace("\n", "\u23ce")
        shown = typer.style(visible, reverse=True) if sys.stdout.isatty() else f"[{visible}]"
        parts.append(shown + "\n" * text.count("\n"))
    return " ".join(parts)


def say(text: str) -> None:
    """Tell people something beside the result, on stderr."""
    typer.echo(text, err=True)


def fail(text: str) -> NoReturn:
    """End the command with exit code 1: it ran, and what it checked is not so."""
    say(text)
    raise typer.Exit(1)


@contextlib.contextmanager
def said_if_slow(text: str, after_s: float = 2.0) -> Iterator[None]:
    """Say what is being done if it is not done after a while."""
    timer = threading.Timer(after_s, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def interruptible(what: str | Callable[[], str]) -> Iterator[None]:
    """Answer Ctrl-C inside with a sentence and exit code 130, and SIGTERM with the same sentence and 143."""
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may set a handler
    before = signal.signal(signal.SIGTERM, _terminate) if is_main else None
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        say(f"\nStopped. {what if isinstance(what, str) else what()}")
        raise typer.Exit(143 if isinstance(error, Terminated) else 130) from None
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _terminate(number: int, frame: Any) -> NoReturn:
    raise Terminated


def progress(items: Iterable[Item], what: str, *, total: int | None = None, quiet: bool = False) -> Iterable[Item]:
    """Show a bar on a terminal's stderr while a loop runs."""
    from tqdm import tqdm

    forbids_bars = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
    bar: Iterable[Item] = tqdm(items, desc=what, total=total, leave=False, disable=quiet or bool(forbids_bars) or None)
    return bar


def duration(seconds: float) -> str:
    """Write a time for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def humanise(name: str, value: Any) -> str:
    """Write a value for people, in the unit that its name gives."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in ("digest", "fingerprint"):
        return str(value)[:12]
    if isinstance(value, str):
        return value
    if name.endswith("bytes"):
        return _bytes(value)
    if name.endswith("_ms"):
        return f"{value:,.1f} ms"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    if name == "created":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.2g}"
    if isinstance(value, float):
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _table(heads: Row, cells: Sequence[Sequence[str]], title: str | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=bool(heads))
    for name, value in heads.items():
        table.add_column(name.replace("_", " "), justify="right" if isinstance(value, int | float) else "left")
    for line in cells:
        table.add_row(*line)
    Console(highlight=False, markup=False).print(table)
