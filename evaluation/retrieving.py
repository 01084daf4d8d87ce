# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pieces that a question is about, found by their words (BM25, by bm25s; no second model).

Source: S. Robertson and H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the variant is
bm25s's default (Lucene's).
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hf_blend.errors import import_extra

from .splitting import Piece

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
