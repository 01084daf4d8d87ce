# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that a command is given: files, folders, JSONL, standard input. What is left out is named with its reason.

Text is read here, as UTF-8; PDF, HTML, office documents and the like become Markdown by markitdown. Whatever is wrong
with a file is a refusal of that file.
"""

import contextlib
import io
import logging
import os
import stat
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hf_blend.errors import HfBlendError, PromptError, import_extra

from .rows import CHUNKS, read_row

CONVERTED = {  # ending → the converter of markitdown; others of its converters fetch, unpack or take anything for text
    ".csv": "CsvConverter",
    ".docx": "DocxConverter",
    ".epub": "EpubConverter",
    ".htm": "HtmlConverter",
    ".html": "HtmlConverter",
    ".ipynb": "IpynbConverter",
    ".msg": "OutlookMsgConverter",
    ".pdf": "PdfConverter",
    ".pptx": "PptxConverter",
    ".xls": "XlsConverter",
    ".xlsx": "XlsxConverter",
}
MARKDOWN = (".md", ".markdown", *CONVERTED)
ROWS = (".jsonl", ".ndjson")
MADE_FOLDERS = ("node_modules", "__pycache__")  # what programs put into folders of people
MOST_MEGABYTES = 64  # of a file
NAMES = ("title", "name", "id")  # of a row in a JSONL file, the first that it has
MAX_TITLE = 200  # characters of a title that are part of a name
MAX_REASON = 200  # characters of another library's message
MOST_NAMED = 5  # files that are named one by one
NO_TEXT = "it holds no text"


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    text: str
    path: Path | None = None
    is_markdown: bool = False


@dataclass
class Corpus:
    """Documents that were read, and the names and reasons of what was left out."""

    documents: list[Document] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def summary(self) -> str:
        """Say what was left out, and why, of many files by reasons alone; empty if nothing was."""
        if not self.left_out:
            return ""
        if len(self.left_out) <= MOST_NAMED:
            parts = [f"{name} ({reason})" for name, reason in self.left_out]
        else:
            reasons = Counter(reason for _, reason in self.left_out)
            parts = [f"{count} files ({reason})" for reason, count in reasons.most_common()]
        return f"Left out: {'; '.join(parts)}."

    def rows(self) -> list[dict[str, str]]:
        """A row for each file or document that was left out."""
        return [{"name": name, "reason": reason} for name, reason in self.left_out]


def read_corpus(
    names: Sequence[str], stdin: Iterable[str] = (), watch: Callable[[Sequence[Path]], Iterable[Path]] = iter
) -> Corpus:
    """Read files, folders and `-`, which is `stdin`. `watch` receives all files and yields them again, for a bar.

    Raises:
        PromptError: a name is no file or folder, or nothing that was named holds text.
    """
    for name in names:
        if name != "-" and not os.path.exists(name):
            raise PromptError(
                f"there is no file or folder {name!r} that can be read. Give files or folders with documents."
            )
    corpus = Corpus()
    labels: dict[Path, str] = {}
    for name in names:
        if name != "-":
            labels |= _files(Path(name))
    for path in watch(list(labels)):
        label = printable(labels[path])
        try:
            corpus.documents += read_file(path, label)
        except HfBlendError as error:  # another file may be good
            corpus.left_out.append((label, short_reason(error)))
            if len(labels) == 1:
                raise
    if "-" in names:
        corpus.documents.append(_from_stdin(stdin))
    if names and not corpus.documents:
        raise PromptError(
            f"no document was found in {', '.join(map(repr, names))}. {corpus.summary()} Give files of text, or "
            f"{', '.join(CONVERTED)}."
        )
    return corpus


def read_file(path: Path, name: str) -> list[Document]:
    """Read the documents of one file: several of a JSONL file, else one.

    Raises:
        PromptError: it cannot be read as text; a note of the error is the reason alone.
        MissingExtraError: markitdown is not installed.
    """
    kind = path.suffix.lower()
    try:
        content = _content(path)
        text = _converted(content, kind) if kind in CONVERTED else _decoded(content)
    except (HfBlendError, KeyboardInterrupt):
        raise
    except Exception as error:  # a crafted file leads a converter to whatever it likes
        raise unreadable(path, _first_line(error)) from error
    documents = [Document(name, text, path, kind in MARKDOWN)]
    if kind in ROWS:
        documents = list(_rows(path, name, text))
    filled = [document for document in documents if document.text.strip()]
    if not filled:
        raise unreadable(path, NO_TEXT)
    for document in filled:
        _refuse_surrogates(document.text, path)
    return filled


def _files(path: Path) -> dict[Path, str]:
    """A file, or those of a folder, with names for people; hidden ones and links out of the folder are not read."""
    if not path.is_dir():
        return {path: path.name}
    root = path.resolve()
    labels = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in MADE_FOLDERS)
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.resolve().is_relative_to(root):
                labels[file] = f"{root.name}/{file.relative_to(root)}"
    return labels


def _content(path: Path) -> bytes:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is a pipe, a socket or a device; - is standard input")
    if status.st_size > MOST_MEGABYTES << 20:
        raise ValueError(f"it has more than {MOST_MEGABYTES} MB")
    return path.read_bytes()


def _decoded(content: bytes) -> str:
    if b"\0" in content:
        raise ValueError("it is not text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start})") from error


def _converted(content: bytes, kind: str) -> str:
    """Markdown of a file's content, made by markitdown."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        text: str = _converter().convert_stream(io.BytesIO(content), file_extension=kind).text_content
    return text


@cache
def _converter() -> Any:
    library = import_extra("markitdown", extra="rag", needed_by="reading documents that are not plain text")
    logging.getLogger("pdfminer").setLevel(logging.ERROR)  # says a line about every odd font
    converter = library.MarkItDown(enable_builtins=False, enable_plugins=False)
    for name in {*CONVERTED.values()}:
        converter.register_converter(getattr(library.converters, name)())
    return converter


def _rows(path: Path, name: str, text: str) -> Iterator[Document]:
    """The chunks of a JSONL file's rows, each a document."""
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other line breaks, such as U+2028
        if not line.strip():
            continue
        row = read_row(path, number, line, (CHUNKS,), may_be_empty=True)
        title = next((str(row[key])[:MAX_TITLE] for key in NAMES if row.get(key)), str(number))
        for index, chunk in enumerate(row[CHUNKS], 1):
            suffix = f".{index}" if len(row[CHUNKS]) > 1 else ""
            yield Document(printable(f"{name}:{title}{suffix}"), chunk, path)


def _from_stdin(stdin: Iterable[str]) -> Document:
    try:
        text = "".join(stdin)
    except UnicodeDecodeError as error:
        raise unreadable("standard input", f"it is not UTF-8 (byte {error.start})") from error
    if not text.strip():
        raise unreadable("standard input", NO_TEXT)
    _refuse_surrogates(text, "standard input")
    return Document("stdin", text)


def _refuse_surrogates(text: str, what: Path | str) -> None:
    """Refuse text with half a character, which JSON can write: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise unreadable(what, f"it holds U+{ord(text[error.start]):X}, half a character") from error


def unreadable(what: Path | str, reason: str) -> PromptError:
    """The refusal of a document; its note is the reason alone."""
    error = PromptError(f"the document {str(what)!r} cannot be read as text: {reason}. Give a file with text.")
    error.add_note(reason)
    return error


def short_reason(error: HfBlendError) -> str:
    """Say why a file was refused, in a few words and without the folder that it is in."""
    return "; ".join(getattr(error, "__notes__", ())) or str(error)


def _first_line(error: Exception) -> str:
    """Say in a line what a converter raised."""
    message = (error.strerror if isinstance(error, OSError) else None) or str(error)  # an OSError names the path
    lines = message.strip().splitlines() or [type(error).__name__]
    return printable(lines[0][:MAX_REASON]).rstrip(". ")


def printable(text: str) -> str:
    """Escape what a terminal would obey or cannot print: control characters, and bytes that are no UTF-8."""
    letters = []
    for letter in text:
        if letter.isprintable() or unicodedata.category(letter) == "Zs":  # a space of another script
            letters.append(letter)
        else:
            letters.append(letter.encode("unicode_escape").decode())
    return "".join(letters)
