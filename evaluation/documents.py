# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that a command is given: files, folders, JSONL, standard input. What is left out is named with its reason.

Markdown and plain text need nothing; HTML needs markdownify and PDF needs pypdf, both in the extra `rag`. A file may
come from a stranger: whatever a parser raises is a refusal of that file, and names are escaped.
"""

import io
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_blend.errors import HfBlendError, PromptError, import_extra
from hf_blend.prompt.pieces import tokenize

from .rows import CHUNKS, read_row

EXTRA = "rag"
NAMES = ("title", "name", "id")  # of a row in a JSONL file, the first that it has
UNKNOWN_SHARE = 0.2  # of the words, from which on it is said
MOST_NAMED = 5  # files that are named one by one
NOT_PROSE = ("script", "style", "noscript", "template", "svg", "nav")  # parts of an HTML page
MAX_BYTES, MAX_HTML_BYTES = 64 << 20, 8 << 20  # of a file; a parsed HTML page takes a hundred times its bytes
MAX_TITLE = 200  # characters of a title that are part of a name
MAX_REASON = 200  # characters of a parser's message


@dataclass(frozen=True)
class Document:
    """One text."""

    name: str
    text: str
    path: Path | None = None
    is_markdown: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))


def printable(text: str) -> str:
    r"""Escape what a terminal would obey or cannot print: control characters, and bytes that are no UTF-8."""
    return "".join(map(_escape, text))


def _escape(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":  # a space of another script
        return char
    if "\udc80" <= char <= "\udcff":  # how Python keeps such a byte
        return f"\\x{ord(char) - 0xDC00:x}"
    return char.encode("unicode_escape").decode()


@dataclass
class Corpus:
    """Documents in files, in folders, and one by one in the lines of JSONL files.

    Iterating reads them, and fills `left_out`.
    """

    names: Sequence[str]
    stdin: Iterable[str] = ()
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse what does not exist, before anything is read."""
        for name in self.names:
            if name != "-" and not Path(name).exists():
                raise PromptError(f"there is no file or folder {name!r}. Give files or folders with documents.")

    def __iter__(self) -> Iterator[Document]:
        self.left_out.clear()
        count = 0
        for name in self.names:
            for document in self._read_name(name):
                count += 1
                yield document
        if self.names and not count:
            raise PromptError(
                f"no document was found in {', '.join(map(repr, self.names))}. {self.said()} Give files or folders "
                f"with texts: {', '.join(sorted(READERS))}."
            )

    def said(self) -> str:
        """Say what was left out, and why; empty if nothing was."""
        if not self.left_out:
            return ""
        reasons = Counter(reason for _, reason in self.left_out)
        if len(self.left_out) <= MOST_NAMED:
            what = "; ".join(f"{name} ({reason})" for name, reason in self.left_out)
        else:
            what = "; ".join(f"{count} file{'s'[: count > 1]} ({reason})" for reason, count in reasons.most_common())
        return f"Left out: {what}."

    def _read_name(self, name: str) -> Iterator[Document]:
        if name == "-":
            yield self._read_stdin()
            return
        path = Path(name)
        if not path.is_dir():
            yield from read_file(path, path.name)
            return
        root = Path(os.path.realpath(path))
        for inner in _entries(root):
            yield from self._read_inner(inner, inner.relative_to(root), root)

    def _read_stdin(self) -> Document:
        try:
            document = Document("stdin", "".join(self.stdin))
        except UnicodeDecodeError as error:
            raise _unreadable("standard input", f"it is not UTF-8 (byte {error.start})") from error
        _refuse_surrogates("standard input", [document])
        return document

    def _read_inner(self, path: Path, below: Path, root: Path) -> Iterator[Document]:
        """Read a file of a folder, or note why not."""
        name, documents = str(Path(root.name, below)), list[Document]()
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            reason = "a link out of the folder"
        elif any(part.startswith(".") for part in (*below.parts, *target.relative_to(root).parts)):
            reason = "hidden"
        elif not target.is_file():
            reason = "a link to no file" if path.is_symlink() else "no file that can be read"
        elif path.suffix.lower() not in READERS:
            reason = f"{path.suffix.lower() or 'a name without ending'} is not read in folders"
        else:
            try:
                documents, reason = read_file(path, name), ""
            except HfBlendError as error:
                reason = short_reason(error)
        if reason:
            self.left_out.append((printable(name), printable(reason)))
        yield from documents


def _entries(root: Path) -> list[Path]:
    """List all that is in a folder and in its folders, which are not listed themselves unless they cannot be read."""
    found, folders = list[Path](), [root]
    for folder in folders:  # which grows meanwhile: os.walk calls itself in Python 3.11, and folders may be deep
        try:
            for entry in list(os.scandir(folder)):
                (folders if entry.is_dir(follow_symlinks=False) else found).append(Path(entry))
        except OSError:
            found.append(folder)
    return sorted(found)


def read_file(path: Path, name: str) -> list[Document]:
    """Read the documents of one file; of an unknown ending, as plain text."""
    ending = path.suffix.lower()
    read, is_markdown = READERS.get(ending, (_text, False))
    try:
        found = _lines(path, name) if ending == ".jsonl" else [Document(name, read(path), path, is_markdown)]
    except HfBlendError:
        raise
    except Exception as error:  # parsers raise whatever a crafted file leads them to
        raise _unreadable(repr(str(path)), _why(error)) from error
    if not any(one.text.strip() for one in found):
        raise _unreadable(repr(str(path)), "it holds no text")
    _refuse_surrogates(repr(str(path)), found)
    return found


def short_reason(error: HfBlendError) -> str:
    """Say why a file was refused, in a few words and without the folder that it is in."""
    return "; ".join(getattr(error, "__notes__", ())) or str(error)


def _bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise _unreadable(repr(str(path)), error.strerror or str(error)) from error
    if len(found) > most:
        raise _unreadable(repr(str(path)), f"it has more than {most >> 20} MB")
    return found


def _text(path: Path, most: int = MAX_BYTES) -> str:
    try:
        return _bytes(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(repr(str(path)), f"it is not UTF-8 (byte {error.start})") from error


def _html(path: Path) -> str:
    parser = import_extra("bs4", extra=EXTRA, wanted_by=f"reading {path.name}")
    markdownify = import_extra("markdownify", extra=EXTRA, wanted_by=f"reading {path.name}")
    soup = parser.BeautifulSoup(_text(path, MAX_HTML_BYTES), "html.parser")
    for tag in soup(list(NOT_PROSE)):
        tag.decompose()
    converter = markdownify.MarkdownConverter(
        heading_style="ATX", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    text: str = converter.convert_soup(soup.body or soup)
    return text.strip() + "\n"


def _pdf(path: Path) -> str:
    pypdf = import_extra("pypdf", extra=EXTRA, wanted_by=f"reading {path.name}")
    content = io.BytesIO(_bytes(path))
    try:
        reader = pypdf.PdfReader(content)
        is_open = not reader.is_encrypted or reader.decrypt("")  # with no password
        pages = [page.extract_text() for page in reader.pages] if is_open else None
    except Exception as error:  # of a crafted file not only its own
        raise _unreadable(repr(str(path)), f"no PDF that pypdf understands: {_why(error)}") from error
    if pages is None:
        raise _unreadable(repr(str(path)), "it is encrypted")
    if not "".join(pages).strip():
        raise _unreadable(repr(str(path)), "its pages hold no text, only pictures")
    return "\n\n".join(pages)


READERS: dict[str, tuple[Callable[[Path], str], bool]] = {  # ending: reader, is it Markdown
    **dict.fromkeys((".txt", ".text", ".rst", ".log"), (_text, False)),
    **dict.fromkeys((".md", ".markdown"), (_text, True)),
    **dict.fromkeys((".html", ".htm", ".xhtml"), (_html, True)),
    ".pdf": (_pdf, False),
    ".jsonl": (_text, False),
}


def _unreadable(what: str, why: str) -> PromptError:
    error = PromptError(f"the document {what} cannot be read as text: {why}. Give a file with text, in UTF-8.")
    error.add_note(why)
    return error


def _why(error: Exception) -> str:
    """Say in a line what a parser raised."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return printable(said[:MAX_REASON])


def _refuse_surrogates(what: str, documents: Iterable[Document]) -> None:
    """Refuse text with half a character, which JSON can write: no tokenizer takes it."""
    for one in documents:
        try:
            one.text.encode()
        except UnicodeEncodeError as error:
            raise _unreadable(what, f"it holds U+{ord(one.text[error.start]):X}, half a character") from error


def _lines(path: Path, name: str) -> list[Document]:
    """The chunks of a JSONL file's rows, each a document."""
    lines = enumerate(_text(path).split("\n"), 1)  # a text may hold other line breaks, such as U+2028
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
