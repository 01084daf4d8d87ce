# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's endpoints around a `Service`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import generate_latest

from ..errors import PromptError
from ..prompt.pieces import TextPrompt
from .answers import Answering, Asked
from .guard import Guard, PromptWorkers, add_errors, body_of, failed
from .meters import Meters
from .prompts import chat_prompt, check_arguments, text_prompt
from .sampling import make_sampling
from .service import Service, Stopping, UnknownModelError
from .structured import Follows
from .wire import ChatRequest, CompletionRequest, Generation, read_request

__all__ = ["make_app"]


class Server:
    """What the endpoints share."""

    def __init__(self, service: Service) -> None:
        self.service, self.meters = service, Meters(service)
        self._workers = PromptWorkers(len(service.tenants.stores))

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
            return await self._workers.make(request.state.tenant.name, lambda: self._asked(fields, build()))

        answering = Answering(self.service, self.meters, request, fields, asked)
        if fields.stream:
            return await answering.stream(lambda error: failed(error, request.state.id))
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


def _tools(fields: Generation) -> list[dict[str, Any]]:
    """As a chat template reads them: what was left out is not there."""
    return [tool.model_dump(exclude_unset=True) for tool in fields.callable] if isinstance(fields, ChatRequest) else []


def make_app(service: Service) -> Guard:
    """The server's application."""
    server = Server(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(title="hf-blend", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_endpoints(app, server)
    add_errors(app)

    return Guard(app, service.tenants, service.limits, server.meters.responded)  # `guard.doors` are the server's


def _add_endpoints(app: FastAPI, server: Server) -> None:
    service = server.service
    longest = getattr(service.engine.model.config.get_text_config(), "max_position_embeddings", None)
    limits, tokens = service.limits, min(service.engine.lengths.values(), default=None)
    renderers = [service.tokenizer, *([service.eyes.processor] if service.eyes is not None else [])]

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        fields = read_request(ChatRequest, await body_of(request), limits)[0]

        def build() -> list[TextPrompt]:
            check_arguments(renderers, fields.chat_template_kwargs)
            messages = [message.for_template() for message in fields.messages]
            template = {**fields.chat_template_kwargs, **({"tools": _tools(fields)} if fields.callable else {})}
            settings = (fields.documents, limits.documents, template, tokens, service.eyes, limits.render_s)
            return [chat_prompt(service.tokenizer, messages, *settings)]

        return await server.answer(request, fields, build)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        fields = read_request(CompletionRequest, await body_of(request), limits)[0]

        def build_one(prompt: str | list[int]) -> TextPrompt:
            chunks = list(fields.documents)
            if fields.chunk_separator and isinstance(prompt, str):
                parts = prompt.split(fields.chunk_separator)
                prompt, chunks = "".join(parts), [*chunks, *filter(str.strip, parts[1:-1])]
            return text_prompt(service.tokenizer, prompt, chunks, limits.documents, tokens)

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
