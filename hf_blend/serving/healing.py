# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing in a server: while the engine is idle, conversations with blended K and V get exact blocks beside them.

Behind a blended answer the ids of prompt and answer are remembered. An idle engine prefills them, oldest conversation
first, in steps of a page or a few: each is a plain request of the engine's own, and ends with its step. Between two
steps nothing is held: the blocks are in the engine's prefix cache, where the next turn finds them by their hashes, and
where any request that needs room may evict them.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.generation.continuous_batching.requests import RequestState

from ..errors import ConfigError
from ..model.author import Author
from ..prompt.pieces import TextPrompt
from .blending import Request, Reuse
from .paged import BlendedPagedCache, salted
from .prefills import BlendedPrefills

__all__ = ["HEALING", "Conversation", "Healing", "Step"]

logger = logging.getLogger(__name__)

HEALING = "hf_blend: heals a conversation"  # the name of the engine's own request
STEP_TOKENS = 64  # most of one step, in whole pages
STEP_SECONDS = 0.1  # that a step may take, unless a page takes longer: a request that comes waits for it
MOST_CONVERSATIONS, MOST_TOKENS = 16, 1 << 16  # remembered of a tenant; the oldest are forgotten


@dataclass(eq=False)
class Conversation:
    """The prompt of a blended request and its answer."""

    ids: tuple[int, ...]  # of both
    prompt_tokens: int
    chunks_end: int  # tokens up to the end of the last chunk
    reuse: Reuse  # the store and the salt of the request, without its prompt
    author: Author
    blended: tuple[int, ...]  # hashes of its blocks with blended K and V
    is_healed: bool = False

    @property
    def tenant(self) -> tuple[Any, ...]:
        """Whose it is: only requests with the same namespace and salt share its blocks."""
        return self.reuse.store.namespace, self.reuse.salt

    def begins(self, prompt: list[int]) -> bool:
        """Return whether a prompt is a later turn of this conversation."""
        start = self.ids[: self.prompt_tokens]
        return len(prompt) > len(start) and tuple(prompt[: len(start)]) == start


class Step(NamedTuple):
    """What one step of the engine heals."""

    conversation: Conversation
    stop: int  # tokens that are exact behind it
    tokens: int  # that it computes


class Healing:
    """The conversations that an engine remembers, and the steps in which it heals them.

    Attributes:
        author: of the K and V that the engine computes now; None if it cannot be said, and then nothing is healed.
        tokens: how many were healed.
        next_turns: how many requests continued a conversation with a blended turn.
        healed_turns: how many of these found all of its chunks in exact blocks.
    """

    def __init__(self, paged: BlendedPagedCache, prefills: BlendedPrefills, safety_margin: float) -> None:
        """`safety_margin` is the share of the blocks that healing leaves free."""
        self._paged, self._prefills, self._safety_margin = paged, prefills, safety_margin
        self._most_tokens = min(max(STEP_TOKENS, paged.page), paged.max_batch_tokens) // paged.page * paged.page
        if not self._most_tokens:
            raise ConfigError(
                f"heal=True came with steps of {paged.max_batch_tokens} tokens, but a step of at least one page, "
                f"{paged.page} tokens, is expected. Choose larger steps or smaller pages, or do not heal."
            )
        self.author: Author | None = None
        self.tokens = self.next_turns = self.healed_turns = 0
        self._conversations: list[Conversation] = []  # the oldest first
        self._running: Step | None = None
        self._step_tokens, self._began = self._most_tokens, 0.0

    @property
    def is_running(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._running is not None

    def note(self, request: Request) -> None:
        """Note a request that is over, while it has its blocks: a blended one is remembered with its answer."""
        state, reuse, outcome = request.state, request.reuse, request.outcome
        tenant = reuse.store.namespace, reuse.salt
        earlier = [row for row in self._conversations if row.tenant == tenant and row.begins(state.initial_tokens)]
        if earlier:
            self.next_turns += 1
            has_chunks = outcome.prefix_tokens > earlier[-1].chunks_end - self._paged.page
            self.healed_turns += outcome.how == "plain" and has_chunks
        if self.author is None or outcome.how not in ("blended", "shared") or reuse.images:
            return
        ids = (*state.initial_tokens, *state.generated_tokens)
        blended = tuple(self._paged.blended_hashes(state.request_id))
        own = Reuse(reuse.store, TextPrompt(()), reuse.salt, is_blended=False)
        latest = Conversation(ids, len(state.initial_tokens), request.chunks_end, own, self.author, blended)
        self._conversations = [row for row in self._conversations if row not in earlier and row.ids != ids] + [latest]
        of_tenant = [row for row in self._conversations if row.tenant == tenant]
        while of_tenant[MOST_CONVERSATIONS:] or sum(len(row.ids) for row in of_tenant) > MOST_TOKENS:
            self._conversations.remove(of_tenant.pop(0))

    def next_step(self) -> Step | None:
        """Return what to heal next; None if all is healed, or if there is no room without evictions."""
        for conversation in self._conversations:
            if conversation.is_healed or conversation.author != self.author:
                continue
            ids, page = conversation.ids, self._paged.page
            exact = self._paged.count_exact([*salted(ids, conversation.reuse.salt), 0])  # with the last block
            end = len(ids) // page * page
            if exact < end:
                tokens = min(self._step_tokens, end - exact)
                has_room = self._paged.has_room(tokens, self._safety_margin)
                return Step(conversation, exact + tokens, tokens) if has_room else None
            conversation.is_healed = True
            self._paged.discard(conversation.blended)
        return None

    def begin(self, step: Step) -> RequestState:
        """Return the request of a step, which finds the blocks of the steps before it as any request does."""
        self._prefills.expect(HEALING, step.conversation.reuse)
        self._running, self._began = step, time.monotonic()
        # two tokens, and no end token: the engine shares no block of a request that ends in the step that fills it
        return RequestState(HEALING, list(step.conversation.ids[: step.stop]), max_new_tokens=2, eos_token_id=-1)

    def end(self, error: Exception | None = None) -> None:
        """Note that a step has run; the conversation of one that failed is forgotten."""
        step, self._running = self._running, None
        if step is None:
            return
        if error is None:
            self.tokens += step.tokens
            fitting = step.tokens * STEP_SECONDS / max(time.monotonic() - self._began, 1e-9) // self._paged.page
            self._step_tokens = min(max(int(fitting), 1) * self._paged.page, self._most_tokens)
            return
        logger.warning("a conversation is not healed: %s: %s", type(error).__name__, error)
        self._conversations = [row for row in self._conversations if row is not step.conversation]
