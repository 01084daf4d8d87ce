# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces that a question is about, found by their words (BM25, by bm25s), and by meaning with a second model.

Source: S. Robertson and H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the variant is
bm25s's default (Lucene's).
"""

import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, Protocol

from hf_blend.errors import import_extra
from hf_blend.prompt.pieces import tokenize

from .documents import Document
from .parsing import LIMITS, FileLimits, too_slow, unreadable

CHUNK_TOKENS = 512
END = "\n\n"
WINDOW_CHARS = 8  # for each token of a piece: so much of a document is split at once, at first
WINDOW_PIECES = 4  # a window of fewer is doubled


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
    """Splits documents for one tokenizer; one that takes longer than its limit is refused by a PromptError.

    The splitter of text takes longer than in proportion to it, so it is given a document by windows: each begins where
    the last piece of the one before began, so that no piece ends because its window does.
    """

    def __init__(self, tokenizer: Any, chunk_tokens: int = CHUNK_TOKENS, limits: FileLimits = LIMITS) -> None:
        self.tokenizer, self.chunk_tokens, self.limits = tokenizer, chunk_tokens, limits

    def split(self, document: Document) -> list[Piece]:
        """Split one document."""
        if len(document.text) <= 2 * WINDOW_CHARS * self.chunk_tokens:
            whole = self._piece(document.name, 0, document.text)
            if len(whole.ids) <= self.chunk_tokens:
                return [whole] if document.text.strip() else []
        return [self._piece(document.name, start, text) for start, text in self._cut(document)]

    def _cut(self, document: Document) -> Iterator[tuple[int, str]]:
        """Where each piece begins, and its text."""
        splitter, text = self._splitter("MarkdownSplitter" if document.is_markdown else "TextSplitter"), document.text
        start, window, seconds = 0, WINDOW_CHARS * self.chunk_tokens, self.limits.seconds_for(len(text))
        started = time.monotonic()
        while start < len(text):
            if time.monotonic() - started > seconds:
                raise unreadable(repr(document.name), too_slow(seconds))
            cut, is_last = splitter.chunk_indices(text[start : start + window]), start + window >= len(text)
            if not is_last and len(cut) < WINDOW_PIECES:
                window *= 2
                continue
            yield from ((start + at, piece) for at, piece in (cut if is_last else cut[:-1]))
            start = len(text) if is_last else start + cut[-1][0]

    def split_all(self, documents: Iterable[Document]) -> list[Piece]:
        """Split documents one after the other."""
        return [piece for document in documents for piece in self.split(document)]

    def _piece(self, name: str, start: int, text: str) -> Piece:
        return Piece(name, start, text, tokenize(self.tokenizer, closed(text)))

    @cached_property
    def _splitter(self) -> Callable[[str], Any]:
        return cache(self._made)

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
FUSED = 100  # pieces of each of two rankings that are fused
RRF_TERM = 60  # of reciprocal rank fusion, as its authors have it
SYLLABLES = r"\p{Han}\p{Hiragana}\p{Katakana}ー\p{Hangul}"  # scripts of which one character may be a word
UNSPACED = rf"{SYLLABLES}\p{{Thai}}\p{{Lao}}\p{{Khmer}}\p{{Myanmar}}"  # scripts whose words run together
LETTERS = r"[\p{L}\p{M}\p{N}]"
RUN = rf"(?V1)[[{UNSPACED}]&&{LETTERS}][[{UNSPACED}\p{{M}}]&&{LETTERS}]*|[{LETTERS}--[{UNSPACED}]]+"
FIRST_UNSPACED = "\u0e00"  # no character of these scripts is before it
UNREAD = r"[\p{Default_Ignorable_Code_Point}\u0640]+"  # soft hyphens, joiners, lengthened Arabic letters


class Ranking(Protocol):
    """An order of the same pieces for a question."""

    def rank(self, question: str) -> list[int]:
        """The numbers of all pieces, the best first."""


class Retriever:
    """Ranks pieces for questions, by words and, where `meaning` is given, also by that: the two rankings are fused."""

    def __init__(self, pieces: Sequence[Piece], top_k: int = TOP_K, meaning: Ranking | None = None) -> None:
        self.pieces, self.top_k, self._meaning = list(pieces), top_k or len(pieces), meaning

    def rank(self, question: str) -> list[Piece]:
        """Give the pieces that a question is about, the best first.

        All are given, in the order of the documents, if there are no more than `top_k`.
        """
        if len(self.pieces) <= self.top_k:
            return self.pieces
        if self._meaning is None:
            numbers = self.rank_by_words(question, self.top_k) or range(self.top_k)
        else:
            numbers = fuse(self.rank_by_words(question, FUSED), self._meaning.rank(question)[:FUSED])[: self.top_k]
        return [self.pieces[number] for number in numbers]

    def rank_by_words(self, question: str, most: int) -> list[int]:
        """The numbers of the pieces that share the most telling words with a question, the best first."""
        words = [[word for word in words_of(question) if word in self._index.vocab_dict]]
        if not words[0]:
            return []
        numbers, scores = self._index.retrieve(words, k=min(most, len(self.pieces)), show_progress=False)
        shares_a_word = scores[0] > 0 if self._meaning else scores[0] >= 0  # a fused ranking leaves the others out
        ranked: list[int] = numbers[0][shares_a_word].tolist()
        return ranked

    def knows(self, question: str) -> bool:
        """Whether any word of a question is in any piece; True where nothing is chosen, or meaning chooses."""
        is_known = len(self.pieces) <= self.top_k or self._meaning is not None
        return is_known or any(word in self._index.vocab_dict for word in words_of(question))

    @cached_property
    def _index(self) -> Any:
        index = import_extra("bm25s", extra="rag", wanted_by="retrieval").BM25()
        index.index([words_of(piece.text) for piece in self.pieces], show_progress=False)
        return index


def fuse(*rankings: Sequence[int]) -> list[int]:
    """Rank by the sum of 1 / (60 + rank) over rankings, which need not hold the same numbers.

    Source: G. Cormack, C. Clarke and S. Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
    Learning Methods", 2009.
    """
    sums: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, 1):
            sums[number] = sums.get(number, 0.0) + 1 / (RRF_TERM + rank)
    return sorted(sums, key=lambda number: -sums[number])


def words_of(text: str) -> list[str]:
    """The words of a text as people read them: however its letters are encoded, in lower case, with their marks.

    Of scripts whose words run together every two neighbours are a word, and where one character may be a word, that.
    """
    words = list[str]()
    for run in _pattern(RUN).findall(readable(text)):
        if run < FIRST_UNSPACED or _pattern(rf"[{UNSPACED}]").match(run) is None:
            words.append(run)
            continue
        letters = _pattern(r"\X").findall(run)
        words += [letter for letter in letters if len(letters) == 1 or _pattern(rf"[{SYLLABLES}]").match(letter)]
        words += map("".join, pairwise(letters))
    return words


def readable(text: str) -> str:
    """A text in the one form in which texts are compared."""
    composed = unicodedata.normalize("NFKC", text).casefold()
    return unicodedata.normalize("NFKC", _pattern(UNREAD).sub("", composed))


@cache
def _pattern(text: str) -> Any:
    return import_extra("regex", extra="rag", wanted_by="retrieval").compile(text)
