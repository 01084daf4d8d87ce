# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing in vLLM: behind a blended answer the proxy asks for the whole conversation once more, without documents.

It asks for one token, at the lowest priority, so that vLLM computes the conversation in full while nobody waits. The
blocks have the salt of plain requests: the proxy sends the next turn with that salt, too, and vLLM's own prefix cache
finds them.
"""

import asyncio
import json
import logging
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from ...prompt.pieces import tokenize

__all__ = ["Conversation", "UpstreamHealing", "answer_text", "noted"]

logger = logging.getLogger(__name__)

LOWEST = (1 << 31) - 1  # priority: vLLM serves smaller ones first
MOST_UNDER_WAY = 8  # requests that heal; behind further answers none is sent
MOST_HEALED = 16  # conversations that are remembered of a tenant
MOST_BYTES = 4 << 20  # of a stream; behind a longer one nothing is healed


@dataclass(frozen=True)
class Conversation:
    """The prompt of a blended request, and what a plain request of it has beside the ids."""

    tenant: str
    ids: Sequence[int]
    fields: dict[str, Any]


class UpstreamHealing:
    """The requests that heal, and the conversations that vLLM has computed in full."""

    def __init__(self, tokenizer: Any, tokens: int | None = None, timeout_s: float = 300.0) -> None:
        """`tokens` are the most of a prompt and its answer; a request that takes longer than `timeout_s` is ended."""
        self._tokenizer, self._tokens, self._timeout_s = tokenizer, tokens, timeout_s
        self._healed = defaultdict[str, deque[tuple[int, ...]]](lambda: deque(maxlen=MOST_HEALED))
        self._tasks = set[asyncio.Task[None]]()
        self._has_warned = False

    def has_healed(self, tenant: str, ids: Sequence[int], stop: int) -> bool:
        """Return whether a prompt continues a healed conversation, whose prompt has all documents, up to `stop`."""
        return any(
            len(prompt) >= stop and tuple(ids[: len(prompt)]) == prompt for prompt in tuple(self._healed[tenant])
        )

    def start(self, client: httpx.AsyncClient, path: str, conversation: Conversation, answer: bytes) -> None:
        """Heal a conversation with its answer, a body or the events of one; nobody waits for it."""
        if len(self._tasks) < MOST_UNDER_WAY:
            task = asyncio.get_running_loop().create_task(self._heal(client, path, conversation, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End what is under way."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _heal(self, client: httpx.AsyncClient, path: str, conversation: Conversation, answer: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await asyncio.to_thread(self._content, conversation, answer)
                response = await client.post(path, content=content, headers={"content-type": "application/json"})
            if response.is_error:
                self._warn(f"{response.status_code} {response.text:.200}")
                return
        except Exception as error:
            self._warn(f"{type(error).__name__}: {error}")
            return
        self._healed[conversation.tenant].append(tuple(conversation.ids))

    def _content(self, conversation: Conversation, answer: bytes) -> bytes:
        """The body of the request that heals."""
        ids = [*conversation.ids, *tokenize(self._tokenizer, answer_text(answer))]
        ids = ids if self._tokens is None else ids[: self._tokens - 1]
        plain = {"prompt": ids, "max_tokens": 1, "temperature": 0, "priority": LOWEST}
        return json.dumps({**conversation.fields, **plain}).encode()

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "vLLM did not heal a conversation: %s. Start it with --scheduling-policy priority, or leave --heal "
                "out. This is said once.", text,
            )  # fmt: skip


def answer_text(answer: bytes) -> str:
    """Return the text of an answer's first choice, from its body or its events."""
    events = [line.removeprefix(b"data:") for line in answer.splitlines() if line.startswith(b"data:")]
    rows = [json.loads(event) for event in events or [answer] if event.strip() != b"[DONE]"]
    choices = [choice for row in rows for choice in row.get("choices") or () if choice.get("index", 0) == 0]
    return "".join(map(_text, choices))


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


async def noted(events: AsyncIterator[bytes], done: Callable[[bytes], None]) -> AsyncIterator[bytes]:
    """Yield events as they come; call `done` with all of them behind the last, unless they are too many."""
    pieces, size = [], 0
    async for piece in events:
        yield piece
        size += len(piece)
        if size <= MOST_BYTES:
            pieces.append(piece)
    if size <= MOST_BYTES:
        done(b"".join(pieces))
