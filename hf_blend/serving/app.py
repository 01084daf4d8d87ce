# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's endpoints around a `Service`."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ..errors import HfBlendError, PromptError
from ..prompt.detokenizer import Detokenizer
from ..prompt.pieces import TextPrompt
from .guard import Guard
from .meters import Meters
from .service import Busy, Running, Service, ServiceError
from .wire import ChatRequest, CompletionRequest, Generation, answer_body, chat_prompt, error_body, text_prompt, usage

__all__ = ["make_app"]

logger = logging.getLogger(__name__)


class UnknownModelError(PromptError):
    """A request names a model that is not served."""


STATUS: dict[type[BaseException], tuple[int, str, str]] = {
    Busy: (429, "rate_limit_error", "too_many_requests"),
    UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    ServiceError: (500, "server_error", "engine_failed"),
    TimeoutError: (504, "server_error", "timeout"),
    HfBlendError: (400, "invalid_request_error", "bad_request"),
    Exception: (500, "server_error", "internal_error"),
}
RETRY_S = "1"
CLIENT_GONE = 499  # as nginx counts it; nobody reads it


class Answering:
    """One request on its way from the engine to the client."""

    def __init__(
        self, app: "Parts", request: Request, asked: Generation, build: Callable[[], TextPrompt], kind: str
    ) -> None:
        self._app, self._request, self._asked, self._build, self._kind = app, request, asked, build, kind
        self._prompt_tokens = 0
        self._run: Running | None = None
        self._reason: str | None = None

    async def texts(self) -> AsyncGenerator[str, None]:
        """The answer's text, piece by piece; closing this cancels the request."""
        service, given = self._app.service, Detokenizer(self._app.service.tokenizer, self._asked.stops)
        most = self._asked.new_tokens or service.limits.new_tokens
        ends, tenant = service.engine.end_tokens, self._request.state.tenant
        async with service.admitted(tenant):
            prompt = await self._app.built(self._build)
            self._prompt_tokens = len(prompt.ids)
            async with aclosing(service.generate(tenant, self._asked, prompt)) as runs:
                async for run in runs:
                    self._run, is_end = run, bool(run.tokens) and run.tokens[-1] in ends
                    is_last = is_end or len(run.tokens) >= most
                    text = given.feed(run.tokens, is_last)
                    if is_last or given.is_stopped:
                        self._reason = "stop" if is_end or given.is_stopped else "length"
                    yield text
                    if self._reason:
                        break
            if self._run is not None:
                self._app.meters.answered(self._run, self.costs())

    def costs(self) -> dict[str, Any]:
        """What it cost so far."""
        tokens = len(self._run.tokens) if self._run else 0
        name = self._run.name if self._run else ""
        return usage(self._prompt_tokens, tokens, self._app.service.engine.outcome(name))

    async def whole(self) -> Response:
        """Answer at once; a client that goes away is noticed."""
        task = asyncio.ensure_future(self._collect())
        gone = asyncio.ensure_future(_gone(self._request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return Response(status_code=CLIENT_GONE)
            text = task.result()
        finally:
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        choice = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice["finish_reason"] = self._reason  # type: ignore[assignment]
        name = self._run.name if self._run else ""
        return JSONResponse(answer_body(self._kind, self._name(name), self._app.service.name, choice, self.costs()))

    async def stream(self) -> Response:
        """Answer token by token. What is refused is refused before the stream begins."""
        texts = self.texts()
        first = await anext(texts, "")
        return StreamingResponse(self._events(first, texts), media_type="text/event-stream")

    async def _collect(self) -> str:
        return "".join([text async for text in self.texts()])

    async def _events(self, first: str, texts: AsyncGenerator[str, None]) -> AsyncIterator[bytes]:
        status = CLIENT_GONE
        try:
            if self._is_chat:
                yield self._event({"delta": {"role": "assistant", "content": first}})
            elif first:
                yield self._event({"text": first})
            async for text in texts:
                if text:
                    yield self._event({"delta": {"content": text}} if self._is_chat else {"text": text})
            yield self._event({"delta": {}} if self._is_chat else {"text": ""}, self._reason)
            if self._asked.stream_options.include_usage:
                yield _sse({**self._head(), "choices": [], "usage": self.costs()})
            status = 200
            yield b"data: [DONE]\n\n"
        except Exception as error:
            status, kind, code = _status(error)
            yield _sse(error_body(_message(error), kind, code))
        finally:
            self._request.state.status = status
            await texts.aclose()

    @property
    def _is_chat(self) -> bool:
        return self._kind == "chat.completion"

    def _name(self, name: str) -> str:
        return f"{'chatcmpl' if self._is_chat else 'cmpl'}-{name}"

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else self._kind
        name = self._name(self._run.name if self._run else "")
        return {"id": name, "object": kind, "created": int(time.time()), "model": self._app.service.name}

    def _event(self, choice: dict[str, Any], reason: str | None = None) -> bytes:
        choices = [{"index": 0, "logprobs": None, "finish_reason": reason, **choice}]
        return _sse({**self._head(), "choices": choices})


class Parts:
    """What the endpoints share."""

    def __init__(self, service: Service) -> None:
        self.service, self.meters = service, Meters(service)
        self._prompts = ThreadPoolExecutor(2, "hf_blend-prompt")  # the event loop's own threads stay free

    async def built(self, build: Callable[[], TextPrompt]) -> TextPrompt:
        """A prompt. Who goes away meanwhile counts as a request until it is made: a thread cannot be stopped."""
        making = asyncio.get_running_loop().run_in_executor(self._prompts, build)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            raise

    async def answer(
        self, request: Request, asked: Generation, kind: str, build: Callable[[], TextPrompt]
    ) -> Response:
        """Answer a request of either kind."""
        if not self.service.is_ready:
            text = "the server is about to stop, or its engine has ended. Ask another."
            return _error(503, text, "server_error", "stopping")
        self.check_model(asked.model or self.service.name)
        asked.check(self.service.limits)
        answering = Answering(self, request, asked, build, kind)
        return await (answering.stream() if asked.stream else answering.whole())

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name != self.service.name:
            raise UnknownModelError(f"the model {name!r:.80} is not served; {self.service.name!r} is. Ask for it.")


def make_app(service: Service) -> Any:
    """The server's application."""
    parts = Parts(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="hf-blend", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_endpoints(app, parts)
    _add_errors(app)

    return Guard(app, service.tenants, service.limits, parts.meters.responded)  # `guard.doors` are the server's


def _add_endpoints(app: FastAPI, parts: Parts) -> None:
    service = parts.service

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: ChatRequest) -> Response:
        def build() -> TextPrompt:
            messages = [{"role": message.role, "content": message.content} for message in asked.messages]
            return chat_prompt(service.tokenizer, messages, asked.documents, service.limits.documents)

        return await parts.answer(request, asked, "chat.completion", build)

    @app.post("/v1/completions")
    async def complete(request: Request, asked: CompletionRequest) -> Response:
        def build() -> TextPrompt:
            prompt, documents = asked.prompt, list(asked.documents)
            if asked.chunk_separator and isinstance(prompt, str):
                parts = prompt.split(asked.chunk_separator)
                prompt, documents = "".join(parts), [*documents, *filter(None, parts[1:-1])]
            return text_prompt(service.tokenizer, prompt, documents, service.limits.documents)

        return await parts.answer(request, asked, "text_completion", build)

    longest = getattr(service.engine.model.config.get_text_config(), "max_position_embeddings", None)
    row = {"id": service.name, "object": "model", "created": 0, "owned_by": "hf-blend", "max_model_len": longest}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [row]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        parts.check_model(name)
        return row

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(parts.meters.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return _error(400, f"{param or 'the body'}: {first['msg']}.", "invalid_request_error", first["type"], param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return _error(error.status_code, text, "invalid_request_error")

    async def ours(request: Request, error: Exception) -> Response:
        status, kind, code = _status(error)
        return _error(status, _message(error), kind, code)

    for kind in STATUS:
        app.add_exception_handler(kind, ours)  # type: ignore[arg-type]


def _status(error: BaseException) -> tuple[int, str, str]:
    return next(row for kind, row in STATUS.items() if isinstance(error, kind))


def _message(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the request took longer than the server allows. Ask for fewer tokens."
    if isinstance(error, HfBlendError):
        return str(error)
    logger.error("a request failed", exc_info=error)
    return "the server failed to answer; its log says why. Send the request again."


def _error(status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    headers = {"retry-after": RETRY_S} if status in (429, 503) else None
    return JSONResponse(error_body(message, kind, code, param), status, headers=headers)


def _sse(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


async def _gone(request: Request) -> None:
    """Returns when the client went away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
