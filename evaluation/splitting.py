# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents in pieces: split at headings, paragraphs and sentences, never inside a word where that can be avoided.

A piece is what is stored, retrieved and named as a source. `hf-blend index` and `hf-blend ask` split alike, so that
what one stores the other finds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_blend.errors import import_extra
from hf_blend.prompt.pieces import tokenize

from .documents import Document

CHUNK_TOKENS = 512
END = "\n\n"


@dataclass(frozen=True)
class Piece:
    """A part of a document."""

    name: str
    start: int
    text: str
    ids: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The character of the document behind the piece."""
        return self.start + len(self.text)

    @property
    def prompt_text(self) -> str:
        """The text as it is in prompts and in the store: with a line break behind it, so that no two run together."""
        return closed(self.text)


def closed(text: str) -> str:
    """A text with a line break behind it."""
    return text if text.endswith("\n") else text + END


class Splitter:
    """Splits documents for one tokenizer."""

    def __init__(self, tokenizer: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tokenizer, self.chunk_tokens = tokenizer, chunk_tokens

    def split(self, document: Document) -> list[Piece]:
        """Split one document."""
        whole = self._piece(document.name, 0, document.text)
        if len(whole.ids) <= self.chunk_tokens:
            return [whole] if document.text.strip() else []
        cut = (self._markdown if document.is_markdown else self._plain).chunk_indices(document.text)
        return [self._piece(document.name, start, text) for start, text in cut]

    def split_all(self, documents: Iterable[Document]) -> list[Piece]:
        """Split documents one after the other."""
        return [piece for document in documents for piece in self.split(document)]

    def _piece(self, name: str, start: int, text: str) -> Piece:
        return Piece(name, start, text, tokenize(self.tokenizer, closed(text)))

    @cached_property
    def _plain(self) -> Any:
        return self._made("TextSplitter")

    @cached_property
    def _markdown(self) -> Any:
        return self._made("MarkdownSplitter")

    def _made(self, kind: str) -> Any:
        splitters = import_extra("semantic_text_splitter", extra="rag", wanted_by="splitting documents")
        capacity = max(1, self.chunk_tokens - len(tokenize(self.tokenizer, END)))
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return getattr(splitters, kind).from_callback(lambda text: len(tokenize(self.tokenizer, text)), capacity)
        from tokenizers import Tokenizer

        counting = Tokenizer.from_str(backend.to_str())  # the user's own may truncate
        counting.no_truncation()
        return getattr(splitters, kind).from_huggingface_tokenizer(counting, capacity)
