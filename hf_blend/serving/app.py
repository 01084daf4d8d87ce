# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's endpoints around a `Service`."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from ..errors import HfBlendError, PromptError
from ..prompt.pieces import TextPrompt
from .answers import Answering, Asked
from .guard import Guard, respond
from .meters import Meters
from .prompts import chat_prompt, text_prompt
from .sampling import make_sampling
from .service import Busy, Service, ServiceError, Stopping
from .structured import Follows
from .wire import ChatRequest, CompletionRequest, Generation, described, error_body

__all__ = ["make_app"]

logger = logging.getLogger(__name__)


class UnknownModelError(PromptError):
    """A request names a model that is not served."""


STATUS: dict[type[BaseException], tuple[int, str, str]] = {
    Busy: (429, "rate_limit_error", "too_many_requests"),
    UnknownModelError: (404, "invalid_request_error", "model_not_found"),
    Stopping: (503, "server_error", "stopping"),
    ServiceError: (500, "server_error", "engine_failed"),
    TimeoutError: (504, "server_error", "timeout"),
    RecursionError: (400, "invalid_request_error", "bad_request"),
    HfBlendError: (400, "invalid_request_error", "bad_request"),
    Exception: (500, "server_error", "internal_error"),
}


class Server:
    """What the endpoints share."""

    def __init__(self, service: Service) -> None:
        self.service, self.meters = service, Meters(service)
        self._prompts = ThreadPoolExecutor(2, "hf_blend-prompt")  # the event loop's own threads stay free
        self._in_turn = defaultdict[str, asyncio.Lock](asyncio.Lock)  # the prompts of a tenant are made one by one

    async def answer(self, request: Request, fields: Generation, build: Callable[[], list[TextPrompt]]) -> Response:
        """Answer a request of either kind."""
        if not self.service.is_ready:
            raise Stopping("the server is about to stop, or its engine has ended. Ask another.")
        self.check_model(fields.model or self.service.name)
        fields.check(self.service.limits)
        if max(fields.logit_bias, default=0) >= self.service.vocabulary:
            odd, size = max(fields.logit_bias), self.service.vocabulary
            raise PromptError(f"logit_bias has the token {odd}, expected one below {size}. Correct it.")

        async def asked() -> Asked:
            async with self._in_turn[request.state.tenant.name]:
                return await self._beside(lambda: self._asked(fields, build()))

        answering = Answering(self.service, self.meters, request, fields, asked)
        if fields.stream:
            return await answering.stream(lambda error: _failed(error, request.state.id))
        return await answering.whole()

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name != self.service.name:
            raise UnknownModelError(f"the model {name!r:.80} is not served; {self.service.name!r} is. Ask for it.")

    def _asked(self, fields: Generation, prompts: list[TextPrompt]) -> Asked:
        service, schema = self.service, fields.json_form
        matcher = None if schema is None else service.grammars.compiled(schema)
        samplings = []
        for number in range(fields.choices):
            tokens = len(prompts[number // fields.n].ids)
            grammar = matcher and Follows(matcher, tokens, sorted(service.engine.end_tokens))
            samplings.append(make_sampling(fields, service.sampling_defaults, tokens, number % fields.n, grammar))
        return Asked(fields, prompts, samplings, _tools(fields))

    async def _beside(self, make: Callable[[], Asked]) -> Asked:
        """Make it in a thread. Who goes away meanwhile counts as a request until then: a thread cannot be stopped."""
        making = asyncio.get_running_loop().run_in_executor(self._prompts, make)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait([making])
            raise


def _tools(fields: Generation) -> list[dict[str, Any]]:
    """As a chat template reads them: what was left out is not there."""
    return [tool.model_dump(exclude_unset=True) for tool in fields.callable] if isinstance(fields, ChatRequest) else []


def make_app(service: Service) -> Any:
    """The server's application."""
    server = Server(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="hf-blend", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_endpoints(app, server)
    _add_errors(app)

    return Guard(app, service.tenants, service.limits, server.meters.responded)  # `guard.doors` are the server's


def _add_endpoints(app: FastAPI, server: Server) -> None:
    service = server.service
    longest = getattr(service.engine.model.config.get_text_config(), "max_position_embeddings", None)
    documents = service.limits.documents

    @app.post("/v1/chat/completions")
    async def chat(request: Request, fields: ChatRequest) -> Response:
        def build() -> list[TextPrompt]:
            messages = [message.for_template() for message in fields.messages]
            template = {**fields.chat_template_kwargs, **({"tools": _tools(fields)} if fields.callable else {})}
            given = (fields.documents, documents, template, longest, service.eyes)
            return [chat_prompt(service.tokenizer, messages, *given)]

        return await server.answer(request, fields, build)

    @app.post("/v1/completions")
    async def complete(request: Request, fields: CompletionRequest) -> Response:
        def build_one(prompt: str | list[int]) -> TextPrompt:
            given = list(fields.documents)
            if fields.chunk_separator and isinstance(prompt, str):
                parts = prompt.split(fields.chunk_separator)
                prompt, given = "".join(parts), [*given, *filter(str.strip, parts[1:-1])]
            return text_prompt(service.tokenizer, prompt, given, documents, longest)

        return await server.answer(request, fields, lambda: [build_one(prompt) for prompt in fields.prompts])

    row = {"id": service.name, "object": "model", "created": 0, "owned_by": "hf-blend", "max_model_len": longest}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [row]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return row

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"ready": service.is_ready}, 200 if service.is_ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = await asyncio.to_thread(generate_latest, server.meters.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        param, message = described(error.errors())
        return _error(400, message, "invalid_request_error", "bad_request", param)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return _error(error.status_code, text, "invalid_request_error")

    async def ours(request: Request, error: Exception) -> Response:
        status, body = _failed(error, request.state.id)
        return respond(status, body)

    for kind in STATUS:
        app.add_exception_handler(kind, ours)  # type: ignore[arg-type]


def _failed(error: BaseException, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and the body that say what went wrong."""
    status, kind, code = next(row for sort, row in STATUS.items() if isinstance(error, sort))
    return status, error_body(_message(error, request_id), kind, code)


def _message(error: BaseException, request_id: str) -> str:
    if isinstance(error, TimeoutError):
        return "the request took longer than the server allows. Ask for fewer tokens."
    if isinstance(error, RecursionError):
        return "the request is nested too deeply. Send lists and objects of fewer levels."
    if isinstance(error, HfBlendError):
        return str(error)
    logger.error("request %s failed", request_id, exc_info=error)
    return f"the server failed to answer; its log says why, of request {request_id}. Send it again."


def _error(status: int, message: str, kind: str, code: str | None = None, param: str | None = None) -> JSONResponse:
    return respond(status, error_body(message, kind, code, param))
