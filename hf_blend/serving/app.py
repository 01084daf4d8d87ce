# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: OpenAI's endpoints around a `Service`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..errors import PromptError
from ..prompt.pieces import TextPrompt
from .answers import Answering, Question
from .guard import PAGES, Guard, PromptWorkers, add_errors, body_of
from .meters import Meters
from .prompts import chat_prompt, check_arguments, text_prompt
from .sampling import make_sampling
from .service import Service
from .structured import Follows
from .wire import ChatRequest, CompletionRequest, Generation, Stopping, UnknownModelError, read_request

__all__ = ["make_app"]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>hf-blend serve</title>
<h1>hf-blend serve</h1>
<p>This address is for programs: clients of OpenAI's API take <code>URL/v1</code> as their base URL.</p>
<pre>{}</pre>
<pre>curl URL/v1/chat/completions -H 'content-type: application/json' -H 'authorization: Bearer KEY' \\
  -d '{{"messages": [{{"role": "user", "content": "Who keeps the light?"}}], "documents": ["Una keeps the light."], \
      "temperature": 0, "max_tokens": 32}}'
</pre>
<p>docs/serving.md of hf_blend has every field and limit.</p></html>
"""


class Endpoints:
    """OpenAI's endpoints, each a method."""

    def __init__(self, service: Service) -> None:
        self._service, self.meters = service, Meters(service)
        self._workers = PromptWorkers(len(service.tenants.stores))
        self._tokens = min(service.engine.lengths.values(), default=None)  # of a prompt
        self._renderers = [service.tokenizer, *([service.eyes.processor] if service.eyes is not None else [])]
        longest = getattr(service.engine.model.config.get_text_config(), "max_position_embeddings", None)
        self._model = {
            "id": service.name, "object": "model", "created": int(time.time()), "owned_by": "hf-blend",
            "max_model_len": longest,
        }  # fmt: skip

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        service, limits = self._service, self._service.limits
        fields = read_request(ChatRequest, await body_of(request), limits)[0]

        def build() -> list[TextPrompt]:
            check_arguments(self._renderers, fields.chat_template_kwargs)
            messages = [message.for_template() for message in fields.messages]
            template = {**fields.chat_template_kwargs, **({"tools": _tools(fields)} if fields.callable else {})}
            settings = (fields.documents, limits.documents, template, self._tokens, service.eyes, limits.render_s)
            return [chat_prompt(service.tokenizer, messages, *settings)]

        return await self._answer(request, fields, build)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        service, limits = self._service, self._service.limits
        fields = read_request(CompletionRequest, await body_of(request), limits)[0]

        def build_one(prompt: str | list[int]) -> TextPrompt:
            chunks = list(fields.documents)
            if fields.chunk_separator and isinstance(prompt, str):
                parts = prompt.split(fields.chunk_separator)
                prompt, chunks = "".join(parts), [*chunks, *filter(str.strip, parts[1:-1])]
            return text_prompt(service.tokenizer, prompt, chunks, limits.documents, self._tokens)

        return await self._answer(request, fields, lambda: [build_one(prompt) for prompt in fields.prompts])

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/NAME`."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self._model)

    async def health(self, request: Request) -> Response:
        """`GET /health`."""
        is_ready = self._service.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        text = await asyncio.to_thread(generate_latest, self.meters.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(self, request: Request, fields: Generation, build: Callable[[], list[TextPrompt]]) -> Response:
        """Answer a chat or a completion."""
        service = self._service
        if not service.is_ready:
            raise Stopping("the server is about to stop, or its engine has ended. Ask another.")
        self._check_model(fields.model or service.name)
        fields.check(service.limits)
        if (token := max(fields.logit_bias, default=0)) >= service.vocabulary:
            raise PromptError(
                f"logit_bias has the token {token}, expected one below {service.vocabulary}. Correct it."
            )

        async def make_question() -> Question:
            return await self._workers.make(request.state.tenant.name, lambda: self._question(fields, build()))

        answering = Answering(service, self.meters, request, fields, make_question)
        return await (answering.stream() if fields.stream else answering.whole())

    def _check_model(self, name: str) -> None:
        if name != self._service.name:
            raise UnknownModelError(f"the model {name!r:.80} is not served; {self._service.name!r} is. Ask for it.")

    def _question(self, fields: Generation, prompts: list[TextPrompt]) -> Question:
        service, schema = self._service, fields.json_form
        matcher = None if schema is None else service.grammars.compiled(schema)
        samplings = []
        for number in range(fields.choices):
            tokens = len(prompts[number // fields.n].ids)
            grammar = matcher and Follows(matcher, tokens, sorted(service.engine.end_tokens))
            samplings.append(make_sampling(fields, service.sampling_defaults, tokens, number % fields.n, grammar))
        return Question(fields, prompts, samplings, _tools(fields))


def _tools(fields: Generation) -> list[dict[str, Any]]:
    """Return tools as a chat template reads them: without the fields that the request leaves out."""
    return [tool.model_dump(exclude_unset=True) for tool in fields.callable] if isinstance(fields, ChatRequest) else []


def make_app(service: Service) -> Guard:
    """Make the server's application."""
    endpoints = Endpoints(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    routes = [
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/completions", endpoints.complete, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    listed = "\n".join(f"{'POST' if 'POST' in (route.methods or ()) else 'GET'} {route.path}" for route in routes)

    def page(request: Request) -> Response:
        return HTMLResponse(PAGE.format(listed.replace(":path}", "}")))

    routes += [Route(path, page) for path in PAGES]
    app = Starlette(routes=routes, lifespan=lifespan)
    add_errors(app)
    return Guard(app, service.tenants, service.limits, endpoints.meters.responded)
