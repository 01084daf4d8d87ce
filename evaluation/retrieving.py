# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces that a question is about, found by their words (BM25, by bm25s; no second model).

Source: S. Robertson and H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the variant is
bm25s's default (Lucene's).
"""

import re
from collections.abc import Iterable, Sequence
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


TOP_K = 8
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]+")  # scripts without spaces: each letter


class Retriever:
    """Ranks pieces for questions."""

    def __init__(self, pieces: Sequence[Piece], top_k: int = TOP_K) -> None:
        self.pieces, self.top_k = list(pieces), top_k or len(pieces)

    def rank(self, question: str) -> list[Piece]:
        """Give the pieces that share the most telling words with a question, the best first.

        All are given, in the order of the documents, if there are no more than `top_k`.
        """
        if len(self.pieces) <= self.top_k:
            return self.pieces
        words = [[word for word in words_of(question) if word in self._index.vocab_dict]]
        if not words[0]:
            return self.pieces[: self.top_k]
        places, _ = self._index.retrieve(words, k=self.top_k, show_progress=False)
        return [self.pieces[place] for place in places[0].tolist()]

    def knows(self, question: str) -> bool:
        """Whether any word of a question is in any piece; True where nothing is chosen."""
        return len(self.pieces) <= self.top_k or any(word in self._index.vocab_dict for word in words_of(question))

    @cached_property
    def _index(self) -> Any:
        found = import_extra("bm25s", extra="rag", wanted_by="retrieval").BM25()
        found.index([words_of(piece.text) for piece in self.pieces], show_progress=False)
        return found


def words_of(text: str) -> list[str]:
    """The words of a text in lower case."""
    return WORD.findall(text.lower())
