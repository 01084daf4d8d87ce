# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Formats of documents: for each a reader that makes text of a file's bytes, and says in an error why there is none.

A file may come from a stranger. A reader may raise anything, and may take long and much memory: `parsing` runs those
that parse in a process of their own. What they unpack or write is bounded here. No reader expands XML entities.
"""

import codecs
import csv
import gzip
import io
import json
import mimetypes
import os
import posixpath
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from hf_blend.errors import import_extra
from hf_blend.prompt.documents import FIELDS

from .rows import CHUNKS, SAME

EXTRA = "rag"
HTML_SHARE = 8  # a parsed HTML page takes a hundred times its bytes, so it may have an eighth of those of other files
NOT_PROSE = ("script", "style", "noscript", "template", "svg", "nav")  # parts of an HTML page
WORD_TAGS = {"w:p": "p", "w:tbl": "table", "w:tr": "tr", "w:tc": "td", "w:br": "br", "w:cr": "br", "w:tab": "br"}
WORD_TEXT = ("w:t", "m:t")  # all other strings in a Word document are fields, positions and deleted text
HEAD_BYTES = 8192  # that tell text from other files
SAMPLE_BYTES = 1 << 16  # that tell the encoding of a text
CONTROLS = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"})
CONTROL_SHARE = 0.02  # of the head, above which it is not text
BYTE_ORDER_MARKS = {  # the longer of two with the same beginning first
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
ENCODINGS = (  # of text that is not Unicode; a short text fits more than its own
    "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "koi8_r",
    "cp932", "euc_jp", "gb18030", "big5", "cp949",
)  # fmt: skip
COMMONEST = "cp1252"  # taken where several fit as well

Kind = Literal["plain", "markdown", "rows"]


class Text(NamedTuple):
    """What a file holds: plain text, Markdown, or rows of JSON with a document each."""

    content: str
    kind: Kind = "plain"


class NoTextError(ValueError):
    """Why a file gives no text, in a few words."""


@dataclass(frozen=True)
class Format:
    """How the bytes of a file become text; `read` takes them and how many bytes of text there may be."""

    read: Callable[[bytes, int], Text]
    modules: tuple[str, ...] = ()
    is_parsed: bool = True
    is_text: bool = True
    share: int = 1  # the file may have this fraction of the most bytes


def format_of(path: Path) -> Format:
    """Tell a file's format by its ending, before which `.gz` may be; others are plain text, if they are text."""
    name = path.name.lower().removesuffix(".gz")
    return FORMATS.get(os.path.splitext(name)[1], PLAIN)


def read_file_text(path: Path, most: int) -> Text:
    """Read the text of a file of at most so many bytes, compressed by gzip or not."""
    kind = format_of(path)
    most_bytes = most // kind.share
    file_size(path)
    with ExitStack() as stack:
        file: Any = stack.enter_context(open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"))  # may be a pipe by now
        if path.suffix.lower() == ".gz":
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        content = file.read(HEAD_BYTES) or b""
        if kind.is_text and is_binary(content):
            media_type = mimetypes.guess_type(path.name)[0] or "text"
            raise NoTextError("it is not text" if media_type.startswith("text") else f"it is {media_type}, not text")
        content += file.read(most_bytes + 1 - len(content)) or b""
    return kind.read(_at_most(content, most_bytes), most)


def file_size(path: Path) -> int:
    """The bytes of a file; what is none is refused before it is opened, and waited for."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise NoTextError("it is a pipe, a socket or a device, for which nobody waits; - is stdin")
    return status.st_size


def is_binary(head: bytes) -> bool:
    """Say whether the beginning of a file is not that of a text."""
    if head.startswith(tuple(BYTE_ORDER_MARKS)):
        return False
    controls = len(head) - len(head.translate(None, CONTROLS))
    return b"\0" in head or controls > CONTROL_SHARE * len(head)


def too_large(most: int) -> str:
    """Why a file of more bytes than these is left out."""
    return f"it has more than {most / (1 << 20):.3g} MB, see --file-megabytes"


def _at_most(content: bytes, most: int) -> bytes:
    if len(content) > most:
        raise NoTextError(too_large(most))
    return content


def decode(content: bytes) -> str:
    """Decode text by its byte order mark, as UTF-8, or in the older encoding that fits it best."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            return content.decode(encoding)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        try:
            return content.decode(_older_encoding(content))
        except ValueError:
            raise NoTextError(f"it is not UTF-8 (byte {error.start}), and no other encoding fits") from error


def _older_encoding(content: bytes) -> str:
    """The encoding that fits the lines that are not ASCII."""
    charset_normalizer = import_extra("charset_normalizer", extra=EXTRA, wanted_by="reading text that is not UTF-8")
    lines = b"\n".join(line for line in content.split(b"\n") if not line.isascii())
    matches = charset_normalizer.from_bytes(lines[:SAMPLE_BYTES], cp_isolation=ENCODINGS)
    best = matches.best()
    if best is None:
        raise NoTextError("no encoding fits")
    for match in matches:
        is_as_good = (match.chaos, match.coherence) == (best.chaos, best.coherence)
        if is_as_good and COMMONEST in match.could_be_from_charset:
            return COMMONEST
    encoding: str = best.encoding
    return encoding


def _plain(content: bytes, most: int) -> Text:
    return Text(decode(content))


def _markdown(content: bytes, most: int) -> Text:
    return Text(decode(content), "markdown")


def _json_lines(content: bytes, most: int) -> Text:
    return Text(decode(content), "rows")


def _json(content: bytes, most: int) -> Text:
    """A list of documents as rows; other JSON as text, in lines and without escapes; what is no JSON as it is."""
    text = decode(content)
    try:
        value = json.loads(text)
        if isinstance(value, list) and value and all(map(_is_document, value)):
            return Text("\n".join(map(json.dumps, value)), "rows")
        has_lines = "\n" in text.strip() and "\\u" not in text
        return Text(text if has_lines else json.dumps(value, indent=1, ensure_ascii=False))
    except (ValueError, RecursionError):  # comments, for example
        return Text(text)


def _is_document(value: Any) -> bool:
    """Say whether an item of a list is a row that has a document, or several."""
    if not isinstance(value, dict):
        return False
    names = (CHUNKS, *(other for other, name in SAME.items() if name == CHUNKS))
    return any(isinstance(value.get(field), str) for field in FIELDS) or any(
        isinstance(value.get(name), list) for name in names
    )


def _notebook(content: bytes, most: int) -> Text:
    """The cells of a Jupyter notebook, code in fences, with what it printed."""
    texts = list[str]()
    try:
        for cell in json.loads(decode(content))["cells"]:
            source = "".join(cell["source"])
            texts.append(source if cell["cell_type"] == "markdown" else f"```\n{source}\n```")
            for output in cell.get("outputs", ()):
                texts.append("".join(output.get("text") or output.get("data", {}).get("text/plain", "")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise NoTextError("no notebook of Jupyter's format 4") from error
    return Text("\n\n".join(text for text in texts if text.strip()), "markdown")


def _table(content: bytes, most: int) -> Text:
    """A line for each row, in which every cell has its column's name; as it is without such names.

    In cells between tabs a quote may mean inches; elsewhere one that is not closed leaves no rows to tell.
    """
    text = decode(content)
    delimiter = max(",;\t|", key=text.split("\n", 1)[0].count)
    readers = [partial(csv.reader), partial(csv.reader, quoting=csv.QUOTE_NONE)][: 2 if delimiter == "\t" else 1]
    for reader in readers:
        lines = io.StringIO(text, newline="")
        with suppress(csv.Error):
            return _rows(text, reader(lines, delimiter=delimiter, strict=True), most)
    return Text(text)


def _rows(text: str, rows: Iterator[list[str]], most: int) -> Text:
    """The rows of a table as lines; its text where the first of them has no names."""
    names = next(rows, [])
    are_names = len({*names}) == len(names) > 1 and not any(map(_is_no_name, names))
    if not are_names:
        return Text(text)
    lines, room = list[str](), most
    for row in rows:
        cells = [(name, cell.strip()) for name, cell in zip_longest(names, row, fillvalue="") if cell.strip()]
        lines.append("; ".join(f"{name.strip()}: {cell}" if name else cell for name, cell in cells))
        room -= len(lines[-1]) + 1
        if room < 0:  # long names may be repeated in many short rows
            raise NoTextError(too_large(most))
    return Text("\n".join([", ".join(names), *lines]) + "\n")


def _is_no_name(cell: str) -> bool:
    """Say whether a cell of the first row cannot be the name of its column."""
    return not cell.strip() or cell.strip()[0] in "0123456789+-."


def _html(content: bytes, most: int) -> Text:
    return Text(_from_html(_parse_html(decode(content))), "markdown")


def _parse_html(text: str) -> Any:
    import bs4

    return bs4.BeautifulSoup(text, "html.parser")


def _from_html(soup: Any) -> str:
    """A parsed page as Markdown."""
    import markdownify

    for tag in soup(list(NOT_PROSE)):
        tag.decompose()
    converter = markdownify.MarkdownConverter(
        heading_style="ATX", strip=["a", "img"], escape_asterisks=False, escape_underscores=False
    )
    text: str = converter.convert_soup(soup.body or soup)
    return text.strip() + "\n"


class _Archive:
    """The files in a zip file, of which no more than so many bytes are unpacked."""

    def __init__(self, content: bytes, most: int) -> None:
        self._zip, self._most, self._room = zipfile.ZipFile(io.BytesIO(content)), most, most

    def __contains__(self, name: str) -> bool:
        return name in self._zip.namelist()

    def parse(self, name: str) -> Any:
        """Parse a file of XML or HTML; an HTML parser leaves entities of XML alone."""
        with self._zip.open(name) as file:
            content = file.read(self._room + 1)
        self._room -= len(content)
        if self._room < 0:
            raise NoTextError(too_large(self._most))
        return _parse_html(decode(content))


def _word(content: bytes, most: int) -> Text:
    """The paragraphs, headings and tables of a Word document, and its notes."""
    archive, texts = _Archive(content, most // HTML_SHARE), list[str]()
    if "word/document.xml" not in archive:
        raise NoTextError("no Word document: it has no word/document.xml")
    for name in ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"):
        if name in archive:
            texts.append(_from_html(_as_html(archive.parse(name))))
    return Text("\n".join(texts), "markdown")


def _as_html(soup: Any) -> Any:
    """Give the tags of a part of a Word document the names of HTML's."""
    for fallback in soup("mc:fallback"):  # has the text of the element before it again
        fallback.decompose()
    for text in soup(string=True):
        if text.parent.name not in WORD_TEXT:
            text.extract()
    for style in soup("w:pstyle"):
        level = style.get("w:val", "").lower().removeprefix("heading")
        paragraph = style.find_parent("w:p")
        if paragraph is not None and level in ("1", "2", "3", "4", "5", "6", "title"):
            paragraph.name = "h1" if level == "title" else f"h{level}"
    for tag in soup(list(WORD_TAGS)):
        tag.name = WORD_TAGS[tag.name]
    return soup


def _epub(content: bytes, most: int) -> Text:
    """The chapters of a book, in the order in which they are read."""
    archive = _Archive(content, most // HTML_SHARE)
    root = archive.parse("META-INF/container.xml").find("rootfile")
    if root is None:
        raise NoTextError("no EPUB: it names no package")
    package = archive.parse(root["full-path"])
    items = {item["id"]: item for item in package("item")}
    chapters = (items[reference["idref"]] for reference in package("itemref"))
    folder = posixpath.dirname(root["full-path"])
    names = [
        posixpath.normpath(posixpath.join(folder, unquote(chapter["href"])))
        for chapter in chapters
        if "html" in chapter.get("media-type", "html")
    ]
    return Text("\n".join(_from_html(archive.parse(name)) for name in names), "markdown")


def _pdf(content: bytes, most: int) -> Text:
    import pypdf

    pages, room = list[str](), most
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        is_open = not reader.is_encrypted or reader.decrypt("")  # with no password
        for page in reader.pages if is_open else ():
            pages.append(page.extract_text())
            room -= len(pages[-1])
            if room < 0:
                break
    except Exception as error:  # of a crafted file not only its own
        raise NoTextError(f"no PDF that pypdf understands: {error or type(error).__name__}") from error
    if not is_open:
        raise NoTextError("it is encrypted")
    if not "".join(pages).strip():
        raise NoTextError("its pages hold no text, only pictures")
    return Text("\n\n".join(pages))


PLAIN = Format(_plain, is_parsed=False)
MARKDOWN, JSON_LINES = Format(_markdown, is_parsed=False), Format(_json_lines, is_parsed=False)
TABLE, JSON, NOTEBOOK = Format(_table), Format(_json), Format(_notebook)
HTML_MODULES = ("bs4", "markdownify")
HTML = Format(_html, HTML_MODULES, share=HTML_SHARE)
WORD, EPUB = Format(_word, HTML_MODULES, is_text=False), Format(_epub, HTML_MODULES, is_text=False)
PDF = Format(_pdf, ("pypdf",), is_text=False)
FORMATS = {  # by ending
    **dict.fromkeys((".txt", ".text", ".rst", ".log"), PLAIN),
    **dict.fromkeys((".md", ".markdown"), MARKDOWN),
    **dict.fromkeys((".jsonl", ".ndjson"), JSON_LINES),
    **dict.fromkeys((".csv", ".tsv"), TABLE),
    **dict.fromkeys((".html", ".htm", ".xhtml"), HTML),
    ".json": JSON,
    ".ipynb": NOTEBOOK,
    ".docx": WORD,
    ".epub": EPUB,
    ".pdf": PDF,
}
