# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents that a command is given: files, folders, JSONL, standard input. What is left out is named with its reason.

Markdown and plain text need nothing; HTML needs markdownify and PDF needs pypdf, both in the extra `rag`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_blend.errors import HfBlendError, PromptError, import_extra
from hf_blend.prompt.pieces import tokenize

EXTRA = "rag"
FIELD, NAMES = "text", ("title", "name", "id")  # of an object in a JSONL file
UNKNOWN_SHARE = 0.2  # of the words, from which on it is said
MOST_NAMED = 5  # files that are named one by one
NOT_PROSE = ("script", "style", "noscript", "template", "svg", "nav")  # parts of an HTML page


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        name: the path below what was given, such as "notes/a.md"; for a line of a JSONL file with its title or number.
        text: the text, as the model will read it.
        path: the file; None for standard input.
        is_markdown: whether headings and lists are marked as in Markdown.
    """

    name: str
    text: str
    path: Path | None = None
    is_markdown: bool = False


@dataclass
class Corpus:
    """Documents in files, in folders, and one by one in the lines of JSONL files.

    Iterating reads them, and fills `left_out`.

    Attributes:
        names: paths; "-" is standard input.
        stdin: lines of standard input.
        left_out: (name, reason) of what was found in a folder and is no document.
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
        """Read one document after the other.

        Raises:
            PromptError: a file that was named cannot be read as text, or nothing was found.
            MissingExtraError: a file that was named needs a package that is not installed.
        """
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
            yield Document("stdin", "".join(self.stdin))
            return
        path = Path(name)
        if not path.is_dir():
            yield from read_file(path, path.name)
            return
        for inner in sorted(path.rglob("*")):
            if inner.is_file():
                yield from self._read_inner(inner, inner.relative_to(path), path.resolve().name)

    def _read_inner(self, path: Path, below: Path, folder: str) -> Iterator[Document]:
        """Read a file of a folder, or note why not."""
        name = str(Path(folder, below))
        if any(part.startswith(".") for part in below.parts):
            self.left_out.append((name, "hidden"))
        elif path.suffix.lower() not in READERS:
            self.left_out.append((name, f"{path.suffix.lower() or 'a name without ending'} is not read in folders"))
        else:
            try:
                yield from read_file(path, name)
            except HfBlendError as error:
                self.left_out.append((name, error.__notes__[0] if hasattr(error, "__notes__") else str(error)))


def read_file(path: Path, name: str) -> Iterator[Document]:
    """Read the documents of one file; of an unknown ending, as plain text.

    Args:
        path: the file.
        name: of the document.

    Yields:
        One document; of a JSONL file one for each line.

    Raises:
        PromptError: it cannot be read, or holds no text. A note says why in short.
        MissingExtraError: a package that reads it is not installed.
    """
    read, is_markdown = READERS.get(path.suffix.lower(), (_text, False))
    if path.suffix.lower() == ".jsonl":
        yield from _lines(path, name)
        return
    text = read(path)
    if not text.strip():
        raise _unreadable(path, "it holds no text")
    yield Document(name, text, path, is_markdown)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"it is not UTF-8 (byte {error.start})") from error


def _html(path: Path) -> str:
    soup = import_extra("bs4", extra=EXTRA, wanted_by=f"reading {path.name}").BeautifulSoup(_text(path), "html.parser")
    markdownify = import_extra("markdownify", extra=EXTRA, wanted_by=f"reading {path.name}")
    for tag in soup(list(NOT_PROSE)):
        tag.decompose()
    converter = markdownify.MarkdownConverter(
        heading_style="ATX", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    text: str = converter.convert_soup(soup.body or soup)
    return text.strip() + "\n"


def _pdf(path: Path) -> str:
    pypdf = import_extra("pypdf", extra=EXTRA, wanted_by=f"reading {path.name}")
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise _unreadable(path, "it is encrypted")
        pages = [page.extract_text() for page in reader.pages]
    except (OSError, ValueError, KeyError, pypdf.errors.PyPdfError) as error:
        raise _unreadable(path, f"no PDF that pypdf understands: {error}") from error
    if not "".join(pages).strip():
        raise _unreadable(path, "its pages hold no text, only pictures")
    return "\n\n".join(pages)


READERS: dict[str, tuple[Callable[[Path], str], bool]] = {  # ending: reader, is it Markdown
    **dict.fromkeys((".txt", ".text", ".rst", ".log"), (_text, False)),
    **dict.fromkeys((".md", ".markdown"), (_text, True)),
    **dict.fromkeys((".html", ".htm", ".xhtml"), (_html, True)),
    ".pdf": (_pdf, False),
    ".jsonl": (_text, False),
}


def _unreadable(path: Path, why: str) -> PromptError:
    error = PromptError(f"the document {str(path)!r} cannot be read as text: {why}. Give a file with text, in UTF-8.")
    error.add_note(why)
    return error


def _lines(path: Path, name: str) -> Iterator[Document]:
    """The lines of a JSONL file: texts, or objects with a field `text`."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            yield _line(path, name, number, line)


def _line(path: Path, name: str, number: int, line: str) -> Document:
    where = f"{path}:{number}"
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where} is not JSON: {error}. Write one text, or one object, on each line.") from error
    text = found.get(FIELD) if isinstance(found, dict) else found
    if not isinstance(text, str):
        shown = line.strip()[:60]
        raise PromptError(f"{where} is {shown!r}, but a text or an object with a field {FIELD!r} is expected.")
    titles = [found[key] for key in NAMES if found.get(key)] if isinstance(found, dict) else []
    return Document(f"{name}:{titles[0] if titles else number}", text, path)


def unknown_words(tokenizer: Any, text: str) -> str:
    """Say so if many words of a text are unknown to a tokenizer; else nothing.

    Args:
        tokenizer: the model's.
        text: documents and question.

    Returns:
        A sentence, or "".
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = tokenize(tokenizer, text) if unknown is not None else ()
    share = sum(token == unknown for token in ids) / max(1, len(ids))
    if share < UNKNOWN_SHARE:
        return ""
    return (
        f"This model knows {len(tokenizer)} words, and {share:.0%} of yours are not among them: its answers mean "
        "nothing here."
    )
