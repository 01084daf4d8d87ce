# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What one visitor may ask for, and the store that is this visitor's own."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hf_blend import ChunkStore
from hf_blend.errors import PromptError

WINDOW_S = 60.0
PUBLIC = None  # the session of documents that come with the page: all visitors share what is stored of them
FILLED = 0.95  # of a store; the rest is for rotary tables, which are kept beside K and V


@dataclass(frozen=True)
class Limits:
    """What the page takes from one visitor.

    All chunks of a prompt fit `store_bytes`, however many bytes a token takes. Of more `visitors` than these the one
    who was away longest is forgotten.
    """

    document_letters: int = 20_000
    question_letters: int = 500
    prompt_tokens: int = 4096
    new_tokens: int = 48
    answers_per_minute: int = 30
    store_bytes: int = 256 << 20
    visitors: int = 16

    def most_tokens(self, token_bytes: int) -> int:
        """How many tokens a prompt may have, so that a visitor's store holds all of it."""
        return min(self.prompt_tokens, int(FILLED * self.store_bytes) // token_bytes)

    def check_letters(self, documents: str, question: str) -> None:
        """Refuse what is empty or too long, before anything is computed."""
        if not documents.strip():
            raise PromptError("there is no document: the box is empty. Write or paste some.")
        if not question.strip():
            raise PromptError("there is no question: the box is empty. Write one, or pick one.")
        if len(documents) > self.document_letters:
            raise PromptError(
                f"the documents have {len(documents):,} letters, but at most {self.document_letters:,} are taken. "
                "Leave some out; on your own machine hf-blend ask has no such limit."
            )
        if len(question) > self.question_letters:
            raise PromptError(
                f"the question has {len(question):,} letters, but at most {self.question_letters:,} are taken here. "
                "Shorten it."
            )


@dataclass
class Visitors:
    """Counts what each visitor asks, and keeps a store for each."""

    limits: Limits = field(default_factory=Limits)
    now: Callable[[], float] = time.monotonic
    _asked: dict[str, deque[float]] = field(default_factory=dict)
    _stores: OrderedDict[str | None, ChunkStore] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, visitor: str) -> None:
        """Count one more answer for a visitor."""
        with self._lock:
            now = self.now()
            self._forget(now)
            times = self._asked.setdefault(visitor, deque())
            if len(times) >= self.limits.answers_per_minute:
                raise PromptError(
                    f"you had {len(times)} answers in the last minute, and others want some too. Ask again in "
                    f"{times[0] + WINDOW_S - now:.0f} seconds."
                )
            times.append(now)

    def store(self, session: str | None) -> ChunkStore:
        """The store of one session; nobody else sees what is in it, but for what is `PUBLIC`."""
        with self._lock:
            if session not in self._stores:
                self._stores[session] = ChunkStore.open("memory://", memory_bytes=self.limits.store_bytes)
            self._stores.move_to_end(session)
            while len(self._stores) > self.limits.visitors:
                self._stores.popitem(last=False)
            return self._stores[session]

    def _forget(self, now: float) -> None:
        """Drop what is older than the window, and visitors of whom nothing is left."""
        for visitor, times in list(self._asked.items()):
            while times and times[0] <= now - WINDOW_S:
                times.popleft()
            if not times:
                del self._asked[visitor]
