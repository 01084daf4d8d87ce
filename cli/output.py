# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a command says: a table to people, plain lines to pipes, one JSON document to programs.

Units are read from names: `nbytes` and `…_bytes`, `…_ms`, `…_ratio`, `created` and `digest` are written for people on
a terminal, and left as they are in pipes and JSON.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, NoReturn, TypeVar

import typer

LINE_S = 5.0  # between two lines of progress in a log

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
    for_people = sys.stdout.isatty()
    write: Callable[[str, Any], str] = humanise if for_people else (lambda _, value: str(value))
    if isinstance(document, Mapping):
        heads: Row = {}
        cells = [[name, write(name, value)] for name, value in document.items()]
    else:
        heads = document[0] if document else {}
        cells = [[write(name, value) for name, value in row.items()] for row in document]
    if for_people:
        _table(heads, cells, title)
    else:
        lines = [list(heads), *cells] if header and heads else cells
        typer.echo("".join("\t".join(line) + "\n" for line in lines), nl=False)


def rounded(row: Row) -> Row:
    """A row with three decimals of every number."""
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def marked(tokens: Iterable[tuple[str, bool]]) -> str:
    """Tokens, of which some stand out on a terminal and in a pipe."""

    def mark(text: str) -> str:
        visible, ends = text.replace("\n", "\u23ce"), "\n" * text.count("\n")
        return (typer.style(visible, reverse=True) if sys.stdout.isatty() else f"[{visible}]") + ends

    return " ".join(mark(text) if stands_out else text for text, stands_out in tokens)


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


@dataclass(frozen=True)
class Cost:
    """What a loop's items cost: the tokens of an item, and the bytes of a token."""

    tokens: Callable[[Any], int]
    bytes_per_token: int


def progress(
    items: Iterable[Item], what: str, *, total: int | None = None, cost: Cost | None = None, quiet: bool = False
) -> Iterator[Item]:
    """Show on stderr how far a loop is: a bar on a terminal, and elsewhere a line every few seconds."""
    forbids_bars = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") and sys.stderr.isatty()  # `main` sets it in pipes
    if quiet or forbids_bars or os.environ.get("TQDM_DISABLE"):
        yield from items
        return
    total = len(items) if total is None and isinstance(items, Sized) else total
    show_pace = _bar if sys.stderr.isatty() else _lines
    yield from show_pace(items, _Pace(what, total, cost, sum(map(cost.tokens, items)) if cost else 0))


@dataclass
class _Pace:
    """How far a loop is: items, and tokens and bytes where they are counted."""

    what: str
    total: int | None
    cost: Cost | None
    total_tokens: int
    items: int = 0
    tokens: int = 0
    started: float = field(default_factory=lambda: time.monotonic())

    def count(self, item: Any) -> None:
        """Count an item that is done."""
        self.items += 1
        self.tokens += self.cost.tokens(item) if self.cost else 0

    def __str__(self) -> str:
        if not self.total:
            return f"{self.items:,} {self.what}"
        texts, seconds = [f"{self.items:,} of {self.total:,} {self.what}"], time.monotonic() - self.started
        done, rest = self.items, self.total - self.items
        if self.cost:
            done, rest = self.tokens, self.total_tokens - self.tokens
            nbytes = humanise("nbytes", self.tokens * self.cost.bytes_per_token)
            texts += [f"{self.tokens / max(seconds, 1e-9):,.0f} tokens/s", nbytes]
        return ", ".join([*texts, *([f"about {duration(seconds / done * rest)} left"] if done else [])])


def _bar(items: Iterable[Item], pace: _Pace) -> Iterator[Item]:
    """Show a bar while a loop runs."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(str(pace), total=pace.total)
        for item in items:
            yield item
            pace.count(item)
            bar.update(task, completed=pace.items, description=str(pace))


def _lines(items: Iterable[Item], pace: _Pace) -> Iterator[Item]:
    """Say now and then how far a loop is; nothing about a short one."""
    last = time.monotonic()
    for item in items:
        if (now := time.monotonic()) - last >= LINE_S and pace.items:
            last = now
            say(str(pace))
        yield item
        pace.count(item)


def duration(seconds: float) -> str:
    """Write a time for people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def humanise(name: str, value: Any) -> str:
    """Write a value for people, in the unit that its name gives."""
    if isinstance(value, str):
        return value[:12] if name in ("digest", "fingerprint") else value
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if name.endswith("bytes"):
        return _bytes(value)
    if name.endswith("_ms"):
        return f"{value:,.1f} ms"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    if name == "created":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if name == "age_s":
        return duration(value) if value < 172800 else f"{value / 86400:.0f} days"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


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
