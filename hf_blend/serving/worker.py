# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that uses the model: it answers one request after the other, and heals conversations while none waits."""

import contextlib
import logging
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..errors import PromptError, PromptLengthError
from ..model.anatomy import text_config
from ..prefill.report import BlendReport
from ..prompt.detokenizer import Detokenizer, TokenStreamer
from ..store import ChunkStore
from .prompts import Input, make_input
from .wire import FAILED, TOO_LONG, ChatRequest, CompletionRequest, Refused, RequestLimits

__all__ = ["Ending", "Job", "ModelWorker"]

logger = logging.getLogger(__name__)

GREEDY = 1e-3  # temperatures below are as 0: logits over them may be beyond float32
HEAL_TOKENS = 64  # of one step; a request that arrives waits for one
DEFAULT_TOKENS = 4096  # of a model that names no limit
LATE = "the request took longer than the {:g} s that the server allows. Ask for fewer tokens."


@dataclass(frozen=True)
class Ending:
    """What is known of an answer when it ends."""

    reason: str  # "stop" or "length"
    usage: dict[str, Any]  # as OpenAI's clients read it, and what hf_blend did


@dataclass(eq=False)
class Job:
    """A request on its way. `tell` is called in the worker's thread with a text, the `Ending`, or an error."""

    tenant: str
    request: ChatRequest | CompletionRequest
    tell: Callable[[str | Ending | Exception], None]
    deadline: float  # by `time.monotonic`
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.is_cancelled.is_set() or time.monotonic() > self.deadline


@dataclass(eq=False)
class Conversation:
    """The K and V of an answered request."""

    tenant: str
    input: Input
    cache: BlendCache
    is_healed: bool = False  # or cannot be


class ModelWorker:
    """One model, the stores of all tenants, and the conversations whose K and V are kept."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        stores: Mapping[str, ChunkStore],
        limits: RequestLimits,
        config: BlendConfig | None = None,
        *,
        heal: bool = True,
        **settings: Any,
    ) -> None:
        """Check that the model can be blended. `config` and `settings` are those of `BlendCache`."""
        self.model = model
        self.tokenizer = tokenizer
        self.stores = stores
        self.limits = limits
        self.healed_tokens = 0
        positions = getattr(text_config(model), "max_position_embeddings", None)
        self.tokens = min(limits.tokens or positions or DEFAULT_TOKENS, positions or sys.maxsize)
        self._config = config
        self._settings = settings
        self._heals = heal
        self._jobs: queue.Queue[Job | None] = queue.Queue(limits.queue)
        self._conversations: list[Conversation] = []  # the latest is the last
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hf_blend-serve", daemon=True)
        self._edits = self._new_cache(next(iter(stores))).config.edits  # refuses a model that cannot be blended

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._is_closed

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        """Queue a request; raises `Refused` if the queue is full or the server ends."""
        if not self.is_ready:
            raise Refused("the server is about to stop. Send the request again later.", status=503, code="stopping")
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise Refused(
                f"{self.waiting} requests wait already. Try again in a moment.", status=429, code="too_many_requests"
            ) from None

    def close(self) -> None:
        """End the answer under way with an error, refuse those that wait, and close the stores."""
        self._is_closed = True
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)  # wakes a worker that waits
        if self._thread.is_alive():
            self._thread.join()
        for store in self.stores.values():
            store.close()

    def _run(self) -> None:
        while not self._is_closed:
            job = self._next_job()
            if job is not None:
                self._answer_or_tell(job)
        while not self._jobs.empty():
            job = self._jobs.get()
            if job is not None:
                job.tell(Refused("the server ends. Send the request again later.", status=503, code="stopping"))

    def _next_job(self) -> Job | None:
        """Wait for a request; heal until one arrives."""
        conversation = self._unhealed()
        if conversation is None:
            return self._jobs.get()
        try:
            return self._jobs.get_nowait()
        except queue.Empty:
            self._heal(conversation)
            return None

    def _answer_or_tell(self, job: Job) -> None:
        try:
            job.tell(self._answer(job))
        except (PromptError, RecursionError, Refused) as error:
            job.tell(error)
        except (MemoryError, torch.OutOfMemoryError):
            self._forget_but(0)
            job.tell(Refused("the memory is full. Send less, or send it later.", status=503, code="memory"))
        except Exception:
            logger.exception("a request failed")
            job.tell(Refused(FAILED, status=500, code="internal_error"))

    def _answer(self, job: Job) -> Ending:
        """Answer a request, and keep its conversation."""
        if job.is_over:
            raise Refused(LATE.format(self.limits.request_s), status=503, code="timeout")
        made = make_input(job.request, self.tokens)
        conversation = self._take_continued(job.tenant, made)
        if conversation is None:
            conversation = Conversation(job.tenant, made, self._new_cache(job.tenant))
        conversation.input = made
        try:
            answer = self._generate(job, conversation)
        except BaseException:
            conversation.cache.reset()
            raise
        conversation.is_healed = False
        self._conversations.append(conversation)
        self._forget_but(self.limits.conversations)
        return answer

    def _generate(self, job: Job, conversation: Conversation) -> Ending:
        """Return an answer."""
        cache = conversation.cache
        try:
            inputs = conversation.input.arguments(cache, self.tokenizer)
        except PromptError as error:
            code = TOO_LONG if isinstance(error, PromptLengthError) else "bad_request"
            raise Refused(str(error), job.request.TEXT, code=code) from error
        prompt_tokens = inputs["input_ids"].shape[1]
        settings = self._generation_settings(job.request, prompt_tokens)

        # Unseeded requests must not continue the random numbers of a seeded one.
        seed = job.request.seed
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        text = _AnswerText(self.tokenizer, job)

        def stops(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            """Whether each row ends: at a stop text, where nobody waits any more, and where the server ends."""
            return ids.new_full(ids.shape[:1], text.is_stopped or job.is_over or self._is_closed).bool()

        criteria = StoppingCriteriaList([stops])
        self.model.generate(
            **inputs, **cache.keyword, **settings, streamer=TokenStreamer(text.add), stopping_criteria=criteria
        )

        if self._is_closed:
            raise Refused("the server ends. Send the request again later.", status=503, code="stopping")
        if job.is_over:
            raise Refused(LATE.format(self.limits.request_s), status=503, code="timeout")
        text.finish()
        is_ended = text.is_stopped or text.tokens[-1] in self._end_tokens()
        usage = _usage(prompt_tokens, len(text.tokens), cache.report)
        return Ending("stop" if is_ended else "length", usage)

    def _generation_settings(self, request: ChatRequest | CompletionRequest, prompt_tokens: int) -> dict[str, Any]:
        """Return the arguments of `generate`; what the request leaves out is as the model's generation config says."""
        room = self.tokens - prompt_tokens
        new_tokens = request.new_tokens
        if new_tokens is None:
            new_tokens = min(self.limits.new_tokens, room)
        if new_tokens > room or room < 1:
            raise Refused(
                f"the prompt has {prompt_tokens} tokens and {new_tokens} are asked for, expected at most "
                f"{self.tokens} together. Shorten the prompt or ask for fewer.",
                request.TEXT,
                code=TOO_LONG,
            )
        settings: dict[str, Any] = {"max_new_tokens": new_tokens}
        if request.temperature is not None and request.temperature < GREEDY:
            return {**settings, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if request.temperature is not None:
            settings |= {"do_sample": True, "temperature": request.temperature}
        if request.top_p is not None:
            settings |= {"do_sample": True, "top_p": request.top_p}
        return settings

    def _end_tokens(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return {ends} if isinstance(ends, int) else set(ends or ())

    def _new_cache(self, tenant: str) -> BlendCache:
        return BlendCache(self.model, self.stores[tenant], self._config, **self._settings)

    def _take_continued(self, tenant: str, made: Input) -> Conversation | None:
        """Remove and return the latest conversation of which the request is a later turn."""
        for conversation in reversed(self._conversations):
            if conversation.tenant == tenant and made.continues(conversation.input):
                self._conversations.remove(conversation)
                return conversation
        return self._take_edited(tenant, made) if self._edits == "blend" else None

    def _take_edited(self, tenant: str, made: Input) -> Conversation | None:
        """Remove and return the conversation of which a request has most, if it has half of it."""
        best, most = None, 0
        for conversation in self._conversations:
            shared = made.shared_characters(conversation.input) if conversation.tenant == tenant else 0
            if shared > most and 2 * shared >= conversation.input.characters:
                best, most = conversation, shared
        if best is not None:
            self._conversations.remove(best)
        return best

    def _forget_but(self, count: int) -> None:
        """Forget the oldest conversations but this many."""
        while len(self._conversations) > count:
            self._conversations.pop(0).cache.reset()

    def _unhealed(self) -> Conversation | None:
        """The latest conversation that is not exact."""
        if not self._heals:
            return None
        for conversation in reversed(self._conversations):
            if not conversation.is_healed:
                return conversation
        return None

    def _heal(self, conversation: Conversation) -> None:
        """Heal some tokens; a conversation that cannot be healed stays as it is."""
        report = conversation.cache.report
        before = report.healed_tokens
        try:
            left_before = conversation.cache.heal(0)
            left = conversation.cache.heal(HEAL_TOKENS)
        except Exception as error:  # noqa: BLE001 - it was answered; its turns go on blended
            logger.warning("a conversation stays blended: %s: %s", type(error).__name__, error)
            left = left_before = 0
        self.healed_tokens += report.healed_tokens - before
        conversation.is_healed = left in (0, left_before)


def _usage(prompt_tokens: int, new_tokens: int, report: BlendReport) -> dict[str, Any]:
    """Return `usage` of an answer; the report changes when the conversation is healed or continued."""
    reused = report.reused_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": report.past_tokens + reused},
        "hf_blend": {
            "reused_tokens": reused,
            "recomputed_tokens": report.exact_tokens + report.reusable_tokens - reused,
            "continued_tokens": report.past_tokens,
            "moved_tokens": report.moved_tokens,
            "computed_chunks": report.computed_chunks,
            "charged_budget": round(report.charged_budget, 4),
            "fallback_reason": report.fallback_reason,
        },
    }


class _AnswerText:
    """Makes text of tokens as they are generated."""

    def __init__(self, tokenizer: Any, job: Job) -> None:
        self.tokens: list[int] = []
        self._job = job
        self._text = Detokenizer(tokenizer, job.request.stops)

    @property
    def is_stopped(self) -> bool:
        """Whether one of the texts in `stop` has come."""
        return self._text.is_stopped

    def add(self, tokens: list[int]) -> None:
        """Pass on what the tokens of a step add."""
        self.tokens += tokens
        self._tell(is_last=False)

    def finish(self) -> None:
        """Pass on what was held back."""
        if not self.is_stopped:
            self._tell(is_last=True)

    def _tell(self, is_last: bool) -> None:
        text = self._text.feed(self.tokens, is_last)
        if text:
            self._job.tell(text)
