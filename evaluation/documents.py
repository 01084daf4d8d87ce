# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that a command is given: files, folders, JSONL, standard input. What is left out is named with its reason.

A file may come from a stranger: what is wrong with it is a refusal of that file, and names are escaped.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_blend.errors import HfBlendError, PromptError
from hf_blend.prompt.pieces import tokenize

from .folder_files import ALL_FILES, FileFilter, Folder
from .formats import FORMATS
from .parsing import LIMITS, FileLimits, FileReader, printable, short_reason, unreadable, why
from .rows import CHUNKS, read_row

NAMES = ("title", "name", "id")  # of a row in a JSONL file, the first that it has
UNKNOWN_SHARE = 0.2  # of the words, from which on it is said
MOST_NAMED = 5  # files that are named one by one
MAX_TITLE = 200  # characters of a title that are part of a name
NO_TEXT = "it holds no text"


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    text: str
    path: Path | None = None
    is_markdown: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))


@dataclass
class Corpus:
    """Documents in files, in folders, and one by one in the lines of JSONL files.

    Iterating reads them, and fills `left_out`: names with their reasons. `watch` receives the files of each folder and
    yields them again, which shows how far reading is.
    """

    names: Sequence[str]
    stdin: Iterable[str] = ()
    limits: FileLimits = LIMITS
    file_filter: FileFilter = ALL_FILES
    watch: Callable[[Sequence[str]], Iterable[str]] = iter
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse what does not exist, before anything is read."""
        for name in self.names:
            if name != "-" and not os.path.exists(name):
                raise PromptError(
                    f"there is no file or folder {name!r} that can be read. Give files or folders with documents."
                )

    def __iter__(self) -> Iterator[Document]:
        self.left_out.clear()
        count, refusal = 0, None
        with FileReader(self.limits) as reader:
            for name in self.names:
                try:
                    for document in self._read_name(name, reader):
                        if document.text.strip():
                            count += 1
                            yield document
                        else:
                            self.leave_out(document.name, NO_TEXT)
                except HfBlendError as error:  # of a file that was named; another may be good
                    self.leave_out(Path(name).name, short_reason(error))
                    refusal = error
        if refusal is not None and len(self.left_out) == 1 and not count:
            raise refusal
        if self.names and not count:
            raise PromptError(
                f"no document was found in {', '.join(map(repr, self.names))}. {self.said()}".rstrip()
                + f" Give files or folders with texts: {', '.join(sorted(FORMATS))}."
            )

    def leave_out(self, name: str, reason: str) -> None:
        """Note what is left out, and why."""
        self.left_out.append((printable(name), printable(reason)))

    def said(self, since: int = 0, *, names_all: bool = False) -> str:
        """Say what was left out, and why, of many files by reasons alone; empty if nothing was."""
        left_out = self.left_out[since:]
        if not left_out:
            return ""
        reasons = Counter(reason for _, reason in left_out)
        if names_all or len(left_out) <= MOST_NAMED:
            what = "; ".join(f"{name} ({reason})" for name, reason in left_out)
        else:
            what = "; ".join(f"{count} file{'s'[: count > 1]} ({reason})" for reason, count in reasons.most_common())
        return f"Left out: {what}."

    def _read_name(self, name: str, reader: FileReader) -> Iterator[Document]:
        if name == "-":
            yield self._read_stdin()
            return
        path = Path(name)
        if not os.path.isdir(path):
            yield from read_file(path, path.name, reader)
            return
        folder = Folder(path, self.file_filter, reader.ignored)
        for file in self.watch(folder.files()):
            try:
                yield from read_file(folder.root / file, folder.name_of(file), reader)
            except HfBlendError as error:
                self.leave_out(folder.name_of(file), short_reason(error))
        for name, reason in folder.left_out:
            self.leave_out(name, reason)

    def _read_stdin(self) -> Document:
        try:
            document = Document("stdin", "".join(self.stdin))
        except UnicodeDecodeError as error:
            raise unreadable("standard input", f"it is not UTF-8 (byte {error.start})") from error
        _refuse_surrogates("standard input", [document])
        return document


def read_file(path: Path, name: str, reader: FileReader | None = None) -> list[Document]:
    """Read the documents of one file, some of which may be empty."""
    if reader is None:
        with FileReader() as reader:
            return read_file(path, name, reader)
    try:
        text = reader.read(path)
        if text.kind == "rows":
            documents = _lines(path, name, text.content)
        else:
            documents = [Document(name, text.content, path, text.kind == "markdown")]
    except HfBlendError:
        raise
    except Exception as error:  # a crafted file leads to whatever it likes
        raise unreadable(repr(str(path)), why(error)) from error
    if not any(document.text.strip() for document in documents):
        raise unreadable(repr(str(path)), NO_TEXT)
    _refuse_surrogates(repr(str(path)), documents)
    return documents


def _refuse_surrogates(what: str, documents: Iterable[Document]) -> None:
    """Refuse text with half a character, which JSON can write: no tokenizer takes it."""
    for document in documents:
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            raise unreadable(what, f"it holds U+{ord(document.text[error.start]):X}, half a character") from error


def _lines(path: Path, name: str, text: str) -> list[Document]:
    """The chunks of a JSONL file's rows, each a document."""
    lines = enumerate(text.split("\n"), 1)  # a text may hold other line breaks, such as U+2028
    return [document for number, line in lines if line.strip() for document in _line(path, name, number, line)]


def _line(path: Path, name: str, number: int, line: str) -> Iterator[Document]:
    row = read_row(path, number, line, (CHUNKS,), may_be_empty=True)
    title = next((str(row[key])[:MAX_TITLE] for key in NAMES if row.get(key)), str(number))
    for index, text in enumerate(row[CHUNKS], 1):
        yield Document(f"{name}:{title}.{index}" if len(row[CHUNKS]) > 1 else f"{name}:{title}", text, path)


def unknown_words(tokenizer: Any, text: str) -> str:
    """Say so if many words of a text are unknown to a tokenizer; else nothing."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = tokenize(tokenizer, text) if unknown is not None else ()
    share = sum(token == unknown for token in ids) / max(1, len(ids))
    if share < UNKNOWN_SHARE:
        return ""
    return (
        f"This model knows {len(tokenizer)} words, and {share:.0%} of yours are not among them: its answers mean "
        "nothing here."
    )
