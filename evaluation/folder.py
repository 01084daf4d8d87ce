# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: what was asked for, one line per answer as it comes, the summary last.

A run that was stopped goes on where it was: a line is there whole, or what is there of it is cut off. A folder of
other settings is refused, so that answers of two runs never mix.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from hf_blend.errors import ConfigError

SETTINGS = "settings.json"
LINES = "answers.jsonl"
SUMMARY = "summary.json"
Key = tuple[Any, ...]  # what tells a line from all others
KEYS = ("task", "model", "method", "ratio", "id")


class RunFolder:
    """A folder that one run writes to."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self._lock = FileLock(path / ".lock", timeout=0)

    def __enter__(self) -> Self:
        """Take the folder and read what it holds."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigError(f"{str(self.path)!r} is a file, expected a folder for results.") from None
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError(f"another run is writing to {str(self.path)!r}. Wait, or give another folder.") from None
        try:
            self._check()
            self.lines = {key_of(line): line for line in self._read()}
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def add(self, lines: list[dict[str, Any]]) -> None:
        """Append answers; they survive whatever comes after."""
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        with (self.path / LINES).open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.lines |= {key_of(line): line for line in lines}

    def write(self, name: str, text: str) -> None:
        """Put a file into the folder, whole or not at all."""
        partial = self.path / f".{name}.part"
        partial.write_text(text, "utf-8")
        os.replace(partial, self.path / name)

    def _check(self) -> None:
        path = self.path / SETTINGS
        if not path.exists():
            others = sorted(path.name for path in self.path.iterdir() if path.name != ".lock")
            if others:
                raise ConfigError(
                    f"{str(self.path)!r} holds {', '.join(others[:3])} and no run. Give a new or empty folder."
                )
            self.write(SETTINGS, json.dumps(self._settings, indent=1) + "\n")
            return
        try:
            recorded = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ConfigError(f"{str(path)!r} is damaged: {error}. Give another folder.") from error
        for name in sorted({*recorded, *self._settings}):
            if recorded.get(name) != self._settings.get(name):
                raise ConfigError(
                    f"{str(self.path)!r} holds a run with {name} {recorded.get(name)!r}, not "
                    f"{self._settings.get(name)!r}. Give another folder, or the same settings to go on."
                )

    def _read(self) -> list[dict[str, Any]]:
        path = self.path / LINES
        if not path.exists():
            return []
        lines, nbytes = whole_lines(path)
        os.truncate(path, nbytes)  # the last line was being written when the run was stopped
        return lines


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the answers of a run."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        return [_answer(text) for text in whole.split(b"\n")[:-1]], len(whole)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} has a damaged line: {type(error).__name__}: {error}. Give another folder."
        ) from error


def _answer(text: bytes) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(text)
    hash(key_of(line))
    if not math.isfinite(line.get("score", 0)):  # some runs measure without scoring
        raise ValueError(f"the score is {line['score']}")
    return line


def key_of(line: Mapping[str, Any]) -> Key:
    """What tells an answer from all others of a run."""
    return tuple(line[key] for key in KEYS)
