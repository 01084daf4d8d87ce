# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files as text. HTML and PDF are parsed in a process of their own, which is killed where a file takes too long.

A file may come from a stranger: whatever a parser raises is a refusal of that file. Plain text needs nothing; HTML
needs markdownify and PDF needs pypdf, both in the extra `rag`.
"""

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Self

from hf_blend.errors import HfBlendError, PromptError, import_extra

EXTRA = "rag"
NOT_PROSE = ("script", "style", "noscript", "template", "svg", "nav")  # parts of an HTML page
HTML_SHARE = 8  # a parsed HTML page takes a hundred times its bytes, so it may have an eighth of those of other files
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

    def read(self, path: Path) -> str:
        """The text of a file; a PromptError says why there is none."""
        parser = PARSERS.get(path.suffix.lower())
        if parser is None:
            return read_text(path, self.limits.megabytes << 20)
        for module in parser.modules:
            import_extra(module, extra=EXTRA, wanted_by=f"reading {path.name}")
        seconds, started = self.limits.seconds_for(_size(path)), time.monotonic()
        line = self._ask(path, seconds)
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            if "why" in answer:
                raise unreadable(repr(str(path)), answer["why"])
            return answer["text"]
        self._end()
        if time.monotonic() - started >= seconds:
            raise too_slow(repr(str(path)), seconds)
        raise unreadable(repr(str(path)), "its parser ended without an answer")

    def _ask(self, path: Path, seconds: float) -> bytes:
        """What the process answers; a part of a line, or nothing, if it was killed."""
        process = self._process = self._process or _start()
        clock = Timer(seconds, process.kill)
        clock.start()
        try:
            process.stdin.write(json.dumps([str(path), self.limits.megabytes << 20]).encode() + b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            return process.stdout.readline()  # type: ignore[union-attr]
        except BrokenPipeError:
            return b""
        finally:
            clock.cancel()
            clock.join()

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
        name, most = json.loads(line)
        answers.write(json.dumps(_answer(Path(name), most)).encode() + b"\n")
        answers.flush()


def _answer(path: Path, most: int) -> dict[str, str]:
    try:
        text = PARSERS[path.suffix.lower()].parse(path, most)
        if len(text) > most:
            raise unreadable(repr(str(path)), too_large(most))
        return {"text": text}
    except HfBlendError as error:
        return {"why": short_reason(error)}
    except Exception as error:  # parsers raise whatever a crafted file leads them to
        return {"why": why(error)}


def _html(path: Path, most: int) -> str:
    import bs4
    import markdownify

    soup = bs4.BeautifulSoup(read_text(path, most // HTML_SHARE), "html.parser")
    for tag in soup(list(NOT_PROSE)):
        tag.decompose()
    converter = markdownify.MarkdownConverter(
        heading_style="ATX", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    text: str = converter.convert_soup(soup.body or soup)
    return text.strip() + "\n"


def _pdf(path: Path, most: int) -> str:
    import pypdf

    content, pages, room = io.BytesIO(_bytes(path, most)), list[str](), most
    try:
        reader = pypdf.PdfReader(content)
        is_open = not reader.is_encrypted or reader.decrypt("")  # with no password
        for page in reader.pages if is_open else ():
            pages.append(page.extract_text())
            room -= len(pages[-1])
            if room < 0:
                break
    except Exception as error:  # of a crafted file not only its own
        raise unreadable(repr(str(path)), f"no PDF that pypdf understands: {why(error)}") from error
    if not is_open:
        raise unreadable(repr(str(path)), "it is encrypted")
    if not "".join(pages).strip():
        raise unreadable(repr(str(path)), "its pages hold no text, only pictures")
    return "\n\n".join(pages)


@dataclass(frozen=True)
class _FileParser:
    """How files of a kind are parsed, and the modules that this needs."""

    parse: Callable[[Path, int], str]
    modules: tuple[str, ...]


_HTML, _PDF = _FileParser(_html, ("bs4", "markdownify")), _FileParser(_pdf, ("pypdf",))
PARSERS = {**dict.fromkeys((".html", ".htm", ".xhtml"), _HTML), ".pdf": _PDF}  # by ending


def read_text(path: Path, most: int) -> str:
    """The text of a file of at most so many bytes that is text itself, without its byte order mark."""
    try:
        return _bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(repr(str(path)), f"it is not UTF-8 (byte {error.start})") from error


def _bytes(path: Path, most: int) -> bytes:
    _size(path)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # it may have become a pipe
            content = file.read(most + 1) or b""
    except OSError as error:
        raise unreadable(repr(str(path)), error.strerror or str(error)) from error
    if len(content) > most:
        raise unreadable(repr(str(path)), too_large(most))
    return content


def _size(path: Path) -> int:
    """The bytes of a file; what is none is refused before it is opened, and waited for."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise unreadable(repr(str(path)), getattr(error, "strerror", None) or str(error)) from error
    if not stat.S_ISREG(status.st_mode):
        raise unreadable(repr(str(path)), "it is a pipe, a socket or a device, for which nobody waits; - is stdin")
    return status.st_size


def too_large(most: int) -> str:
    """Why a file of more bytes than these is left out."""
    return f"it has more than {most >> 20} MB, see --file-megabytes"


def too_slow(what: str, seconds: float) -> PromptError:
    """The refusal of a file that took longer than it may."""
    return unreadable(what, f"it takes more than {seconds:.4g} s, see --file-seconds")


def unreadable(what: str, reason: str) -> PromptError:
    """The refusal of a document; its note is the reason alone."""
    error = PromptError(f"the document {what} cannot be read as text: {reason}. Give a file with text, in UTF-8.")
    error.add_note(reason)
    return error


def short_reason(error: HfBlendError) -> str:
    """Say why a file was refused, in a few words and without the folder that it is in."""
    return "; ".join(getattr(error, "__notes__", ())) or str(error)


def why(error: Exception) -> str:
    """Say in a line what a parser raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return printable(said[:MAX_REASON])


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
