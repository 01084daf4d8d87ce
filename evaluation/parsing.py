# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files as text. What has to be parsed is parsed in a process of its own, which is killed where a file takes too long.

A file may come from a stranger: whatever a parser raises is a refusal of that file.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any, Self

from hf_blend.errors import HfBlendError, PromptError, import_extra

from .folder_files import ignored_files
from .formats import EXTRA, Text, file_size, format_of, read_file_text, too_large

MAX_REASON = 200  # characters of a parser's message
MAX_MEMORY = 4 << 30  # bytes of address space of the process that parses


@dataclass(frozen=True)
class FileLimits:
    """What a file may take before it is left out.

    `megabytes` are those of the file, and of its text; `seconds` are for each MB of it, or for a smaller file.
    """

    megabytes: int = 64
    seconds: float = 30.0

    def seconds_for(self, nbytes: int) -> float:
        """How long a file of a size may take."""
        return self.seconds * max(1.0, nbytes / 1e6)


LIMITS = FileLimits()


class FileReader:
    """Reads files as text, within limits. A context: leaving it ends the process that parses."""

    def __init__(self, limits: FileLimits = LIMITS) -> None:
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def read(self, path: Path) -> Text:
        """The text of a file; a PromptError says why there is none."""
        file_format, most = format_of(path), self.limits.megabytes << 20
        for module in file_format.modules:
            import_extra(module, extra=EXTRA, wanted_by=f"reading {path.name}")
        try:
            if not file_format.is_parsed:
                return read_file_text(path, most)
            return Text(*self._ask(["read", str(path), most], self.limits.seconds_for(file_size(path))))
        except HfBlendError:
            raise
        except Exception as error:
            raise unreadable(repr(str(path)), why(error)) from error

    def ignored(self, rules: dict[str, list[str]], names: Sequence[str]) -> list[bool]:
        """Say which files of a folder its `.gitignore` files leave out; a ValueError says why nobody knows."""
        nbytes = sum(map(len, names)) + sum(map(len, itertools.chain.from_iterable(rules.values())))
        verdicts: list[bool] = self._ask(["ignored", rules, list(names)], self.limits.seconds_for(nbytes))
        return verdicts

    def _ask(self, request: list[Any], seconds: float) -> Any:
        """What the process answers to a request; a ValueError says why it does not."""
        started, process = time.monotonic(), self._process or _start()
        self._process = process
        clock = Timer(seconds, process.kill)
        clock.start()
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            line = process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            line = b""
        finally:
            clock.cancel()
            clock.join()
        if not line.endswith(b"\n"):  # it was killed, here or by the system
            self._end()
            is_late = time.monotonic() - started >= seconds
            raise ValueError(too_slow(seconds) if is_late else "its parser ended without an answer")
        answer = json.loads(line)
        if "why" in answer:
            raise ValueError(answer["why"])
        return answer["answer"]

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _start() -> "subprocess.Popen[bytes]":
    """Start the process that parses; Ctrl-C does not reach it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hf_blend.evaluation.parsing"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def answer_requests() -> None:
    """Parse each file that standard input names, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a parser prints is no answer
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin.buffer:
        answers.write(json.dumps(_answer(*json.loads(line))).encode() + b"\n")
        answers.flush()


def _answer(request: str, *arguments: Any) -> dict[str, Any]:
    try:
        return {"answer": REQUESTS[request](*arguments)}
    except HfBlendError as error:
        return {"why": short_reason(error)}
    except Exception as error:  # parsers raise whatever a crafted file leads them to
        return {"why": why(error)}


def _read(name: str, most: int) -> Text:
    text = read_file_text(Path(name), most)
    if len(text.content) > most:
        raise ValueError(too_large(most))
    return text


REQUESTS: dict[str, Callable[..., Any]] = {"read": _read, "ignored": ignored_files}


def too_slow(seconds: float) -> str:
    """Why a file that took longer than it may is left out."""
    return f"it takes more than {seconds:.4g} s, see --file-seconds"


def unreadable(what: str, reason: str) -> PromptError:
    """The refusal of a document; its note is the reason alone."""
    error = PromptError(f"the document {what} cannot be read as text: {reason}. Give a file with text.")
    error.add_note(reason)
    return error


def short_reason(error: HfBlendError) -> str:
    """Say why a file was refused, in a few words and without the folder that it is in."""
    return "; ".join(getattr(error, "__notes__", ())) or str(error)


def why(error: Exception) -> str:
    """Say in a line what a parser raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    message = (error.strerror if isinstance(error, OSError) else None) or str(error)  # which names the path
    line = (message.strip().splitlines() or [type(error).__name__])[0]
    return printable(line[:MAX_REASON])


def printable(text: str) -> str:
    r"""Escape what a terminal would obey or cannot print: control characters, and bytes that are no UTF-8."""
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":  # a space of another script
        return char
    if "\udc80" <= char <= "\udcff":  # how Python keeps such a byte
        return f"\\x{ord(char) - 0xDC00:x}"
    return char.encode("unicode_escape").decode()


if __name__ == "__main__":
    answer_requests()
