# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces that documents are split into, and those that a question is about, found by their words (BM25, by bm25s).

Source: S. Robertson and H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the variant is
bm25s's default (Lucene's).
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby, pairwise
from typing import Any

from hf_blend.errors import import_extra
from hf_blend.prompt.pieces import tokenize

from .documents import Document

CHUNK_TOKENS = 512
TOP_K = 4  # pieces for a question
END = "\n\n"
WINDOW_CHARS = 8  # for each token of a piece: so much of a document is split at once, at first
WINDOW_PIECES = 4  # a window of fewer is doubled
SYLLABLES = "\u2e80"  # from here on a character of the scripts below may be a word
UNSPACED = (  # scripts whose words run together, or in which one character may be a word
    ("\u0e00", "\u109f"), ("\u1780", "\u17ff"), ("\u2e80", "\u9fff"), ("\uac00", "\ud7ff"),
    ("\U00020000", "\U0003ffff"),
)  # fmt: skip
TATWEEL = "\u0640"  # lengthens Arabic letters


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
    """Splits documents for one tokenizer.

    The splitter of text takes longer than in proportion to it, so it is given a document by windows: each begins where
    the last piece of the one before began, so that no piece ends because its window does.
    """

    def __init__(self, tokenizer: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.tokenizer = tokenizer
        self.chunk_tokens = chunk_tokens

    def split(self, document: Document) -> list[Piece]:
        """Split one document."""
        if not document.text.strip():
            return []
        if len(document.text) <= 2 * WINDOW_CHARS * self.chunk_tokens:
            whole = self._piece(document.name, 0, document.text)
            if len(whole.ids) <= self.chunk_tokens:
                return [whole]
        return [self._piece(document.name, start, text) for start, text in self._cut(document)]

    def split_all(self, documents: Iterable[Document]) -> list[Piece]:
        """Split documents one after the other."""
        pieces = []
        for document in documents:
            pieces += self.split(document)
        return pieces

    def _cut(self, document: Document) -> Iterator[tuple[int, str]]:
        """Where each piece begins, and its text."""
        splitter = self._markdown_splitter if document.is_markdown else self._text_splitter
        text = document.text
        start = 0
        window = WINDOW_CHARS * self.chunk_tokens
        while start < len(text):
            pieces = splitter.chunk_indices(text[start : start + window])
            is_last = start + window >= len(text)
            if is_last:
                for offset, piece in pieces:
                    yield start + offset, piece
                return
            if len(pieces) < WINDOW_PIECES:
                window *= 2
                continue
            for offset, piece in pieces[:-1]:
                yield start + offset, piece
            start += pieces[-1][0]

    def _piece(self, name: str, start: int, text: str) -> Piece:
        return Piece(name, start, text, tokenize(self.tokenizer, closed(text)))

    @cached_property
    def _text_splitter(self) -> Any:
        return self._build("TextSplitter")

    @cached_property
    def _markdown_splitter(self) -> Any:
        return self._build("MarkdownSplitter")

    def _build(self, kind: str) -> Any:
        library = import_extra("semantic_text_splitter", extra="rag", needed_by="splitting documents")
        splitter = getattr(library, kind)
        capacity = max(1, self.chunk_tokens - len(tokenize(self.tokenizer, END)))
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return splitter.from_callback(lambda text: len(tokenize(self.tokenizer, text)), capacity)
        from tokenizers import Tokenizer

        counting = Tokenizer.from_str(backend.to_str())  # the user's own may truncate
        counting.no_truncation()
        return splitter.from_huggingface_tokenizer(counting, capacity)


class Retriever:
    """Ranks pieces for questions by the words that they share."""

    def __init__(self, pieces: Sequence[Piece], top_k: int = TOP_K) -> None:
        self.pieces = list(pieces)
        self.top_k = top_k or len(self.pieces)

    def rank(self, question: str) -> list[Piece]:
        """Give the pieces that a question is about, the best first.

        All are given, in the order of the documents, if there are no more than `top_k`.
        """
        if len(self.pieces) <= self.top_k:
            return self.pieces
        words = self._known_words(question)
        if not words:
            return self.pieces[: self.top_k]
        numbers, _ = self._index.retrieve([words], k=self.top_k, show_progress=False)
        return [self.pieces[number] for number in numbers[0].tolist()]

    def knows(self, question: str) -> bool:
        """Whether any word of a question is in any piece; True where nothing is chosen."""
        return len(self.pieces) <= self.top_k or bool(self._known_words(question))

    def _known_words(self, question: str) -> list[str]:
        return [word for word in words_of(question) if word in self._index.vocab_dict]

    @cached_property
    def _index(self) -> Any:
        index = import_extra("bm25s", extra="rag", needed_by="retrieval").BM25()
        index.index([words_of(piece.text) for piece in self.pieces], show_progress=False)
        return index


def words_of(text: str) -> list[str]:
    """The words of a text, however its letters are encoded, in lower case, with their marks.

    Of scripts whose words run together every two neighbours are a word, and where one character may be a word, that.
    """
    composed = unicodedata.normalize("NFKC", text).casefold().replace(TATWEEL, "")
    visible = "".join(letter for letter in composed if unicodedata.category(letter) != "Cf")  # no joiners
    words = []
    for kind, run in groupby(unicodedata.normalize("NFKC", visible), _kind):
        letters = list(run)
        if kind == "word":
            words.append("".join(letters))
        elif kind == "unspaced":
            words += [letter for letter in letters if letter >= SYLLABLES or len(letters) == 1]
            words += ["".join(pair) for pair in pairwise(letters)]
    return words


@cache
def _kind(letter: str) -> str:
    """Whether a character is of a word, of words that run together, or of neither."""
    if unicodedata.category(letter)[0] not in "LMN":
        return ""
    is_unspaced = any(first <= letter <= last for first, last in UNSPACED)
    return "unspaced" if is_unspaced else "word"
