# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP application: OpenAI's endpoints around a `ModelWorker`."""

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ..errors import PromptError
from ..tenants import Tenant
from .meters import Meters
from .wire import FAILED, ChatRequest, CompletionRequest, Refused, RequestLimits, read_request
from .worker import Ending, Job, ModelWorker

__all__ = ["make_app"]

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
RETRY_S = "1"
POLL_S = 0.5  # after which it is seen that a client has left
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class Answering:
    """The answer to one request, as it arrives from the worker."""

    def __init__(self, request: Request, job: Job, parts: asyncio.Queue[Any], name: str) -> None:
        self._request = request
        self._parts = parts
        self._is_chat = isinstance(job.request, ChatRequest)
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        self._began_s = time.perf_counter()
        self._client_seen_s = self._began_s
        self.first_token_s = 0.0

    async def next_part(self) -> str | Ending:
        """Wait for text or the end of the answer; raises what the worker could not do, and if the client left."""
        part = None
        while part is None:
            try:
                async with asyncio.timeout(POLL_S):
                    part = await self._parts.get()
            except TimeoutError:
                pass
            # Parts may come faster than the wait ends.
            if time.perf_counter() - self._client_seen_s >= POLL_S:
                self._client_seen_s = time.perf_counter()
                if await self._request.is_disconnected():
                    raise ClientDisconnect
        if isinstance(part, Exception):
            raise part
        self.first_token_s = self.first_token_s or time.perf_counter() - self._began_s
        return part

    async def whole(self) -> tuple[dict[str, Any], Ending]:
        """Return the body of a response that is not streamed, and its answer."""
        text = ""
        while isinstance(part := await self.next_part(), str):
            text += part
        said = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": [_choice(said, part.reason)], "usage": part.usage}, part

    async def events(self, part: str | Ending, has_usage: bool) -> AsyncGenerator[str | Ending, None]:
        """Yield server-sent events, and the answer before the last of them; `part` is the first."""
        if self._is_chat:
            yield self._event([_choice({"delta": {"role": "assistant", "content": ""}}, None)])
        while isinstance(part, str):
            said: dict[str, Any] = {"delta": {"content": part}} if self._is_chat else {"text": part}
            yield self._event([_choice(said, None)])
            part = await self.next_part()
        yield part
        said = {"delta": {}} if self._is_chat else {"text": ""}
        yield self._event([_choice(said, part.reason)])
        if has_usage:
            yield self._event([], usage=part.usage)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return _sse({**self._head, "object": kind, "choices": choices, **more})


class Endpoints:
    """OpenAI's endpoints, each a method."""

    def __init__(self, worker: ModelWorker, name: str, tenants: Sequence[Tenant], limits: RequestLimits) -> None:
        self._worker = worker
        self._name = name
        self._limits = limits
        # Keys are compared by their hashes: the time that takes says nothing about them.
        self._tenants = {_hashed(tenant.api_key): tenant.name for tenant in tenants}
        self._needs_key = any(tenant.api_key for tenant in tenants)
        self.meters = Meters(worker)

    def guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint whose errors are answered, and whose responses are counted."""

        async def answer(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except Exception as error:  # noqa: BLE001 - each has an answer
                response = respond_error(request, error)
            self.meters.responded(response.status_code)
            return response

        return answer

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionRequest)

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._tenant(request)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "hf-blend"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        """`GET /health`."""
        return JSONResponse({"ready": self._worker.is_ready}, 200 if self._worker.is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        text = await asyncio.to_thread(generate_latest, self.meters.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _tenant(self, request: Request) -> str:
        """The namespace that the request's key opens."""
        if not self._needs_key:
            return next(iter(self._tenants.values()))
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        tenant = self._tenants.get(_hashed(key.strip()))
        if kind.lower() != "bearer" or tenant is None:
            raise Refused("the key is missing or unknown. Send authorization: Bearer KEY.", status=401, code="bad_key")
        return tenant

    async def _body(self, request: Request) -> bytes:
        """The body, within the limits of bytes and seconds."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip()
        if media_type != "application/json":  # a page in a browser may send others to any address
            raise Refused(
                f"the header content-type is {media_type!r:.60}, expected 'application/json'. Send it with the body.",
                status=415,
                code="unsupported_media_type",
            )
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._limits.body_bytes:
                        raise Refused(
                            f"the body has more than {self._limits.body_bytes} bytes. Send a smaller one.",
                            status=413,
                            code="too_large",
                        )
        except TimeoutError:
            raise Refused(
                f"the body did not arrive within {self._limits.body_s:g} s. Send it faster.", status=408, code="slow"
            ) from None
        return bytes(body)

    async def _answer(self, request: Request, kind: type[ChatRequest | CompletionRequest]) -> Response:
        tenant = self._tenant(request)
        fields = read_request(kind, await self._body(request), self._limits)
        if fields.model not in ("", self._name):
            text = f"the model {fields.model!r:.80} is not served, but {self._name!r} is. Ask for it."
            raise Refused(text, "model", status=404, code="model_not_found")
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[Any] = asyncio.Queue()

        def tell(part: Any) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        job = Job(tenant, fields, tell, time.monotonic() + self._limits.request_s)
        answering = Answering(request, job, parts, self._name)
        self._worker.submit(job)
        try:
            if not fields.stream:
                body, answer = await answering.whole()
                self.meters.answered(answer, answering.first_token_s)
                return JSONResponse(body)
            first = await answering.next_part()  # an error before it has a status of its own
        except BaseException:
            job.is_cancelled.set()
            raise
        return StreamingResponse(self._stream(answering, job, first), media_type="text/event-stream")

    async def _stream(self, answering: Answering, job: Job, first: str | Ending) -> AsyncGenerator[str, None]:
        """Yield server-sent events; a client that leaves closes this generator."""
        try:
            async for event in answering.events(first, job.request.stream_options.include_usage):
                if isinstance(event, str):
                    yield event
                else:
                    self.meters.answered(event, answering.first_token_s)
        except Exception as error:  # noqa: BLE001 - as event of the stream
            yield _sse(_refusal(error).body())
        finally:
            job.is_cancelled.set()
        yield "data: [DONE]\n\n"


def make_app(worker: ModelWorker, name: str, tenants: Sequence[Tenant], limits: RequestLimits) -> Starlette:
    """Make the application; it starts the worker, and closes it and its stores when it ends."""
    endpoints = Endpoints(worker, name, tenants, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.close)

    routes = [
        Route("/v1/chat/completions", endpoints.guarded(endpoints.chat), methods=["POST"]),
        Route("/v1/completions", endpoints.guarded(endpoints.complete), methods=["POST"]),
        Route("/v1/models", endpoints.guarded(endpoints.models)),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: respond_error})


def respond_error(request: Request, error: Exception) -> Response:
    """Answer with an error; one that passes says when to ask again."""
    refusal = _refusal(error)
    headers = {"retry-after": RETRY_S} if refusal.status in (429, 503) else None
    return JSONResponse(refusal.body(), refusal.status, headers)


def _refusal(error: Exception) -> Refused:
    """Return what to answer where an error was raised; one that nobody foresaw is logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, PromptError):
        return Refused(str(error))
    if isinstance(error, RecursionError):
        return Refused("the request is nested too deeply. Send fewer levels.")
    if isinstance(error, HTTPException):
        return Refused(f"{error.detail}.", status=error.status_code)
    if isinstance(error, ClientDisconnect):
        return Refused("the client left.", status=CLIENT_GONE)
    logger.error("a request failed", exc_info=error)
    return Refused(FAILED, status=500, code="internal_error")


def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "finish_reason": reason, "logprobs": None}


def _sse(event: Any) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def _hashed(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
