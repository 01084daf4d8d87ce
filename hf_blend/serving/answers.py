# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The answers to one request: tokens of the engine become text, log probabilities and calls, whole or as events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import PromptError
from ..prompt.detokenizer import Detokenizer
from ..prompt.pieces import TextPrompt
from .engine import Prefilled  # first, since it refuses a transformers that lacks what serving needs
from .guard import CLIENT_GONE, failed, while_connected
from .meters import Meters
from .sampling import Sampling
from .service import Running, Service
from .tenants import Tenant, admitted
from .tools import Parts
from .wire import ChatRequest, Generation

__all__ = ["Answering", "Question", "sse"]

FIGURES = ("reused_tokens", "recomputed_tokens", "prefix_tokens", "computed_chunks")
Put = Callable[["Step | Exception"], None]


@dataclass(frozen=True)
class Question:
    """A request whose prompts are made."""

    fields: Generation
    prompts: list[TextPrompt]  # each gets `fields.n` answers
    samplings: list[Sampling]  # one for each answer
    tools: list[dict[str, Any]]  # as the chat template reads them


class Step(NamedTuple):
    """What one or several tokens added to an answer."""

    answer: "Answer"
    parts: list[dict[str, Any]]  # new parts of its message
    tokens: int  # of which its text is made so far
    reason: str | None  # why it ends, if it does


class Candidate(NamedTuple):
    """A token of an answer, or one of the likeliest in its place."""

    token: int
    logprob: float
    added: bytes  # to the text
    name: str  # in the vocabulary

    @property
    def text(self) -> str:
        r"""The token in a chat: bytes that are no whole character as \xf0; the name of a token without text."""
        return self.added.decode("utf-8", "backslashreplace") or self.name

    @property
    def key(self) -> str:
        """The token in a completion, which has no field for its bytes."""
        is_whole = not self.added or self.text.encode() == self.added
        return self.text if is_whole else f"bytes:{self.text}"

    def entry(self) -> dict[str, Any]:
        """The token as an element of a chat's `content` or `top_logprobs`."""
        return {"token": self.text, "logprob": self.logprob, "bytes": list(self.added)}


def by_key(row: Sequence[Candidate]) -> dict[str, float]:
    """Return `top_logprobs` of a completion from the answer's token and the likeliest ones.

    A token whose text another one has is named by its id.
    """
    own, *top = row
    keys = {own.key: own.token}
    for candidate in top:
        keys.setdefault(candidate.key, candidate.token)
    rest = [] if own.token in [candidate.token for candidate in top] else [own]
    items = [*top, *rest]
    return {item.key if keys[item.key] == item.token else f"token_id:{item.token}": item.logprob for item in items}


class Answer:
    """One answer, as it grows."""

    def __init__(self, number: int, service: Service, question: Question) -> None:
        fields = question.fields
        self.number, self._service, self._fields = number, service, fields
        self.prompt, self._sampling = question.prompts[number // fields.n], question.samplings[number]
        self._text = Detokenizer(service.tokenizer, fields.stops, skips_special=not question.tools)
        self._ends = frozenset[int]() if fields.ignore_eos else service.engine.end_tokens
        is_forced = bool(question.tools) and fields.json_form is not None
        before = service.tokenizer.decode(self.prompt.ids) if question.tools and not is_forced else ""
        self._parts = Parts(service.tokenizer, before, question.tools, is_forced)
        self.run: Running | None = None
        self.reason: str | None = None
        self._tokens: list[int] = []  # those of the text
        self._told = 0  # how many of them were sent with their log probabilities

    async def write(self, tenant: Tenant, put: Put) -> None:
        """Let the engine write the answer; each step, or the error that ends it, goes to `put`."""
        most = self._fields.new_tokens or self._service.limits.new_tokens
        try:
            runs = self._service.generate(tenant, self._fields, self.prompt, self._sampling)
            async with aclosing(runs):
                async for self.run in runs:
                    tokens = self.run.tokens
                    if not tokens:
                        continue
                    is_end = tokens[-1] in self._ends
                    self._tokens = tokens[:-1] if is_end else tokens
                    is_last = is_end or len(tokens) >= most
                    text = self._text.feed(self._tokens, is_last)
                    if self._sampling.error:
                        raise PromptError(f"the JSON schema became too complex: {self._sampling.error}. Simplify it.")
                    is_over = is_last or self._text.is_stopped
                    parts = self._parts.feed(text, is_over)
                    if is_over:
                        is_stopped = is_end or self._text.is_stopped
                        self.reason = "tool_calls" if self._parts.has_calls else "stop" if is_stopped else "length"
                    is_whole = is_over and not self._text.is_stopped
                    tokens_given = len(self._tokens) if is_whole else self._text.tokens_given
                    put(Step(self, parts, tokens_given, self.reason))
                    if is_over:
                        break
        except Exception as error:
            put(error)

    @property
    def prefilled(self) -> Prefilled:
        """How the prompt was computed."""
        return (self.run and self._service.engine.outcome(self.run.name)) or Prefilled("plain")

    def logprobs(self, end: int) -> dict[str, Any] | None:
        """Return the log probabilities of the first `end` tokens, without those that were returned before."""
        if self._fields.alternatives is None:
            return None
        rows = range(self._told, end)
        self._told = max(end, self._told)
        candidates = [self._candidates(index) for index in rows]
        if isinstance(self._fields, ChatRequest):
            content = [{**own.entry(), "top_logprobs": [token.entry() for token in top]} for own, *top in candidates]
            return {"content": content, "refusal": None}
        return {
            "tokens": [own.key for own, *_ in candidates],
            "token_logprobs": [own.logprob for own, *_ in candidates],
            "top_logprobs": [by_key(row) for row in candidates],
            "text_offset": [self._text.offsets[index] for index in rows],
        }

    def _candidates(self, index: int) -> list[Candidate]:
        """Return the token at an index of the answer, and the likeliest in its place."""
        noted = self._sampling.logprobs[index]
        rows = [(self._tokens[index], noted.logprob), *noted.top]
        added = self._text.added(self._tokens, index, [token for token, _ in rows])
        name_of = self._service.tokenizer.convert_ids_to_tokens
        return [Candidate(*row, own, str(name_of(row[0]) or "")) for row, own in zip(rows, added, strict=True)]


class Answering:
    """The response to one request, whole or as events."""

    def __init__(
        self,
        service: Service,
        meters: Meters,
        request: Request,
        fields: Generation,
        build: Callable[[], Awaitable[Question]],
    ) -> None:
        """`build` makes the prompts; it is called when the request is admitted."""
        self._service, self._meters, self._request, self._fields = service, meters, request, fields
        self._build, self._answers = build, list[Answer]()

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Iterate over the steps of all answers; closing the iterator cancels the request."""
        tenant = self._request.state.tenant
        async with admitted(self._service.running, self._service.limits, tenant, self._fields.choices):
            question = await self._build()
            self._answers = [Answer(number, self._service, question) for number in range(self._fields.choices)]
            steps: asyncio.Queue[Step | Exception] = asyncio.Queue()
            tasks = [asyncio.ensure_future(answer.write(tenant, steps.put_nowait)) for answer in self._answers]
            try:
                while not all(answer.reason for answer in self._answers) or not steps.empty():
                    step = await steps.get()
                    if isinstance(step, Exception):
                        raise step
                    yield step
            finally:
                for task in tasks:
                    task.cancel()
                for answer in self._answers:  # before the next await, where a client that is gone may end it
                    if answer.run is not None:
                        answer.run.begun = answer.prefilled.begun or answer.run.begun  # of a blend; else of the engine
                        self._meters.answered(answer.run, costs([answer]), is_whole=answer.reason is not None)
                await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> Response:
        """Respond with all answers when they are complete."""
        rows = await while_connected(self._request, self._collect())
        if rows is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse({**self._head(""), "choices": rows, "usage": costs(self._answers, self._fields.n)})

    async def stream(self) -> Response:
        """Respond with events. A request that is refused is refused before the first of them."""
        steps = self.steps()
        first = await anext(steps)
        return StreamingResponse(self._events(first, steps), media_type="text/event-stream")

    async def _collect(self) -> list[dict[str, Any]]:
        """Return `choices` of the complete answers."""
        messages = [{"role": "assistant", "content": ""} for _ in range(self._fields.choices)]
        logprobs = [dict[str, Any]() for _ in messages]
        async for step in self.steps():
            for delta in step.parts:
                _join(messages[step.answer.number], delta)
            _join(logprobs[step.answer.number], step.answer.logprobs(step.tokens) or {})
        rows = zip(self._answers, messages, logprobs, strict=True)
        return [
            self._row(answer, _message(message), answer.reason, scores or None) for answer, message, scores in rows
        ]

    async def _events(self, first: Step, steps: AsyncGenerator[Step, None]) -> AsyncIterator[bytes]:
        status = CLIENT_GONE
        try:
            if self._is_chat:
                for answer in self._answers:
                    yield self._event(answer, {"role": "assistant"})
            for event in self._events_of(first):
                yield event
            async for step in steps:
                for event in self._events_of(step):
                    yield event
            if self._fields.stream_options.include_usage:
                yield sse({**self._head(), "choices": [], "usage": costs(self._answers, self._fields.n)})
            status = 200
            yield b"data: [DONE]\n\n"
        except Exception as error:
            status, body = failed(error, self._request.state.id)
            yield sse(body)
        finally:
            self._request.state.status = status
            await steps.aclose()

    def _events_of(self, step: Step) -> list[bytes]:
        """Return the events of a step; the last event of an answer has its `finish_reason` and what is left."""
        answer, end = step.answer, step.tokens
        events = [self._event(answer, delta, logprobs=answer.logprobs(end)) for delta in step.parts]
        if step.reason:
            rest = {} if step.reason == "tool_calls" or not self._is_chat else {"content": ""}  # as in the whole
            events.append(self._event(answer, rest, step.reason, answer.logprobs(end)))
        return events

    def _event(
        self, answer: Answer, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        return sse({**self._head(), "choices": [self._row(answer, delta, reason, logprobs, "delta")]})

    def _row(self, answer: Answer, message: dict[str, Any], reason: Any, logprobs: Any, name: str = "message") -> Any:
        """Return an answer, or what is new of it, as an element of `choices`."""
        form = {name: message} if self._is_chat else {"text": message.get("content", "")}
        return {"index": answer.number, "logprobs": logprobs, "finish_reason": reason, **form}

    @property
    def _is_chat(self) -> bool:
        return isinstance(self._fields, ChatRequest)

    def _head(self, end: str = ".chunk") -> dict[str, Any]:
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{self._request.state.id}"
        kind = f"chat.completion{end}" if self._is_chat else "text_completion"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._service.name}


def _join(row: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Append texts and lists to those of a row."""
    for name, value in more.items():
        row[name] = row[name] + value if row.get(name) else value


def _message(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "content": row["content"] or None} if "tool_calls" in row else row


def sse(body: dict[str, Any]) -> bytes:
    """Return an event of a stream."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def costs(answers: Sequence[Answer], each: int = 1) -> dict[str, Any]:
    """Return `usage` of answers so far; a prompt that has several answers, `each`, counts once."""
    prompts = answers[::each]
    prefills = [answer.prefilled for answer in prompts]
    own = {name: sum(getattr(prefill, name) for prefill in prefills) for name in FIGURES}
    own["prefix_tokens"] += sum(prefill.tokens for prefill in prefills if prefill.how == "shared")
    tokens = {
        "prompt_tokens": sum(len(answer.prompt.ids) for answer in prompts),
        "completion_tokens": sum(len(answer.run.tokens) for answer in answers if answer.run),
    }
    charged = prefills[0].charged_budget
    return {
        **tokens,
        "total_tokens": sum(tokens.values()),
        "prompt_tokens_details": {"cached_tokens": own["reused_tokens"] + own["prefix_tokens"]},
        "hf_blend": {
            "prefill": prefills[0].how, **own, "charged_budget": None if charged is None else round(charged, 4)
        },
    }  # fmt: skip
