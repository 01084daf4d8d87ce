# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of vLLM: turns the field `documents` of OpenAI's requests into what the connector asks for.

    hf-blend serve --upstream http://127.0.0.1:8001 --model MODEL

A prompt is tokenised here, once: its ids travel with its documents and the salt of its plan, and vLLM takes these ids.
All else of a request that is taken, and the answer, passes as it is. Keys, bodies and limits are those of the server.
Tenants are told apart by their keys; only the proxy knows the secrets with which their salts are made, so vLLM itself
must be out of their reach.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...config import BlendConfig
from ...errors import PromptError
from ...prompt.pieces import TextPrompt
from ...serving.guard import (
    CLIENT_GONE,
    Guard,
    PromptWorkers,
    add_errors,
    body_of,
    failed,
    respond,
    while_connected,
)
from ...serving.pictures import opened_images
from ...serving.prompts import chat_prompt, check_arguments, check_chat, check_text_prompt, text_prompt
from ...serving.tenants import Tenant, Tenants, admitted
from ...serving.wire import ChatRequest, Generation, Limits, Message, error_body, read_request
from .fields import UpstreamChat, UpstreamCompletion
from .healing import Conversation, UpstreamHealing, noted
from .plan import plan_salt

__all__ = ["make_proxy"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS: dict[str, type[Generation]] = {CHAT: UpstreamChat, COMPLETIONS: UpstreamCompletion}
OURS = ("cache_salt", "kv_transfer_params")  # fields of vLLM that a client does not set
UNBOUNDED = httpx.Limits(max_connections=None)  # requests are counted before
PROBES = httpx.Limits(max_connections=8)  # for vLLM's health, which strangers may ask for, and its models
PROBE_S, CONNECT_S = 10.0, 10.0
EVENTS = "text/event-stream"


class Proxy:
    """What a request becomes before vLLM sees it, and how many are under way."""

    def __init__(
        self,
        tokenizer: Any,
        config: BlendConfig,
        tenants: Sequence[Tenant] = (),
        limits: Limits | None = None,
        tokens: int | None = None,
        heal: bool = False,
    ) -> None:
        """No prompt of more than `tokens` is made, if that is given; with `heal`, vLLM heals what was blended."""
        self._tokenizer, self._config, self._tokens = tokenizer, config, tokens
        self.limits, self.running = limits or Limits(), Counter[str]()
        self.healing = UpstreamHealing(tokenizer, tokens, self.limits.request_s) if heal else None
        self.tenants = Tenants(list(tenants) or [Tenant()], lambda tenant: None)  # type: ignore[arg-type,return-value]

    def rewrite(self, fields: Generation, body: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
        """The body for vLLM: a prompt with documents as ids, its documents, and the salt of its plan."""
        rewritten = {name: value for name, value in body.items() if name not in (*OURS, "documents")}
        if isinstance(fields, ChatRequest):
            rewritten["messages"] = [_for_vllm(*row) for row in zip(fields.messages, body["messages"], strict=True)]
        salt = partial(plan_salt, config=self._config, tenant=tenant.name, secret=tenant.secret)
        plain = {"cache_salt": salt((), ())} if tenant.name else {}  # no blended block has the salt of an empty plan
        prompt = self._chat(fields) if isinstance(fields, ChatRequest) else self._text(fields)
        if prompt is None:
            return rewritten | plain
        ids, spans = list(prompt.ids), [list(span) for span in prompt.spans()]
        told: dict[str, Any] = {"documents": spans, "tenant": tenant.name}
        if isinstance(fields, ChatRequest):
            told["prompt_token_ids"] = ids
        else:
            rewritten["prompt"] = ids
        stop = max((span.stop for span in prompt.spans()), default=0)
        if self.healing is not None and self.healing.has_healed(tenant.name, ids, stop):
            return rewritten | plain | {"kv_transfer_params": {**told, "documents": []}}
        return rewritten | {"kv_transfer_params": told, "cache_salt": salt(ids, spans)}

    def conversation(self, body: dict[str, Any], tenant: Tenant) -> Conversation | None:
        """What is healed behind the answer to a body for vLLM; None where nothing is blended."""
        told = body.get("kv_transfer_params") or {}
        if self.healing is None or not told.get("documents") or body.get("echo"):
            return None
        salt = plan_salt((), (), self._config, tenant=tenant.name, secret=tenant.secret)
        fields = {"model": body.get("model"), "cache_salt": salt if tenant.name else None}
        ids = told.get("prompt_token_ids") or body["prompt"]
        return Conversation(tenant.name, ids, {name: value for name, value in fields.items() if value is not None})

    def _chat(self, fields: ChatRequest) -> TextPrompt | None:
        """The prompt of a chat with documents; what vLLM makes of others is within the same limits."""
        check_arguments([self._tokenizer], fields.chat_template_kwargs)
        messages = [message.for_template() for message in fields.messages]
        tools = [tool.model_dump(exclude_unset=True) for tool in fields.tools]
        template = {**fields.chat_template_kwargs, **({"tools": tools} if tools else {})}
        if fields.documents:
            chat = (fields.documents, self.limits.documents, template, self._tokens, None, self.limits.render_s)
            return chat_prompt(self._tokenizer, messages, *chat)
        check_chat(self._tokenizer, messages, (), template, self._tokens)
        list(opened_images(messages, self.limits))
        return None

    def _text(self, fields: Any) -> TextPrompt | None:
        """As above, of a completion."""
        if not fields.documents:
            for prompt in fields.prompts:
                check_text_prompt(self._tokenizer, prompt, (), self._tokens)
            return None
        if len(fields.prompts) > 1:
            raise PromptError(f"{len(fields.prompts)} prompts came with documents, expected one. Send them apart.")
        return text_prompt(self._tokenizer, fields.prompts[0], fields.documents, self.limits.documents, self._tokens)


def _for_vllm(message: Message, row: dict[str, Any]) -> dict[str, Any]:
    """A message with a refusal as its content, and its reasoning under both names: as the server reads it."""
    thoughts = message.reasoning_content or message.reasoning
    more: dict[str, Any] = {"reasoning_content": thoughts, "reasoning": thoughts} if thoughts else {}
    more |= {"content": message.refusal, "refusal": None} if message.refusal and not message.content else {}
    return {**row, **more}


class Relay:
    """Hands requests to vLLM, and its answers back."""

    def __init__(self, upstream: str, proxy: Proxy, transport: Any = None) -> None:
        self._proxy, self._workers = proxy, PromptWorkers(len(proxy.tenants.stores))
        common: dict[str, Any] = {"base_url": upstream, "transport": transport}
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_S), limits=UNBOUNDED, **common)
        self._probes = httpx.AsyncClient(timeout=PROBE_S, limits=PROBES, **common)

    async def probe(self, request: Request) -> Response:
        """Ask vLLM for something small."""
        answer = await self._probes.get(request.url.path)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def forward(self, request: Request) -> Response:
        """Ask vLLM for an answer; a client that goes away is noticed."""
        proxy, limits, tenant = self._proxy, self._proxy.limits, request.state.tenant
        fields, body = read_request(KINDS[request.url.path], await body_of(request), limits)
        fields.bound(limits)
        until = asyncio.get_running_loop().time() + limits.request_s
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(admitted(proxy.running, limits, tenant, fields.choices))
            make = partial(self._content, fields, body, tenant)
            del body
            async with asyncio.timeout_at(until):
                response = await while_connected(request, self._send(request, make, stack))
            if response is None:
                return Response(status_code=CLIENT_GONE)
            answer, conversation = response
            kind = answer.headers.get("content-type", "")
            if not kind.startswith(EVENTS):
                if conversation is not None and answer.is_success:
                    self._heal(conversation, answer.content)
                return Response(answer.content, answer.status_code, media_type=kind or None)
            events = _events(request, answer, until)
            if conversation is not None and answer.is_success:
                events = noted(events, partial(self._heal, conversation))
            return _Relayed(events, answer.status_code, kind, stack.pop_all())

    async def close(self) -> None:
        """Close all connections to vLLM."""
        if self._proxy.healing is not None:
            await self._proxy.healing.close()
        await self._client.aclose()
        await self._probes.aclose()

    def _heal(self, conversation: Conversation, answer: bytes) -> None:
        if self._proxy.healing is not None:
            self._proxy.healing.start(self._client, COMPLETIONS, conversation, answer)

    def _content(self, fields: Generation, body: dict[str, Any], tenant: Tenant) -> tuple[bytes, Conversation | None]:
        """The body for vLLM, and what is healed behind its answer."""
        rewritten = self._proxy.rewrite(fields, body, tenant)
        try:
            content = json.dumps(rewritten, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the body has the character {error.object[error.start]!r}, which is half of a surrogate pair. Leave "
                "it out."
            ) from error
        return content, self._proxy.conversation(rewritten, tenant)

    async def _send(
        self, request: Request, make: Callable[[], tuple[bytes, Conversation | None]], stack: AsyncExitStack
    ) -> tuple[httpx.Response, Conversation | None]:
        content, conversation = await self._workers.make(request.state.tenant.name, make)
        headers = {"content-type": "application/json", "accept": request.headers.get("accept", "*/*")}
        sent = self._client.build_request("POST", request.url.path, content=content, headers=headers)
        answer = await self._client.send(sent, stream=True)
        stack.push_async_callback(answer.aclose)
        if not answer.headers.get("content-type", "").startswith(EVENTS):
            await answer.aread()
        return answer, conversation


class _Relayed(StreamingResponse):
    """Events of vLLM's; when they end, or the client goes away, so does what holds them."""

    def __init__(self, events: AsyncIterator[bytes], status: int, kind: str, holding: AsyncExitStack) -> None:
        super().__init__(events, status, media_type=kind)
        self._holding = holding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._holding:
            await super().__call__(scope, receive, send)


async def _events(request: Request, answer: httpx.Response, until: float) -> AsyncIterator[bytes]:
    """The events of an answer; one that breaks off, or takes too long, ends with an error."""
    parts = answer.aiter_bytes()
    try:
        while True:
            async with asyncio.timeout_at(until):
                piece = await anext(parts, None)
            if piece is None:
                return
            yield piece
    except (TimeoutError, httpx.HTTPError) as error:
        status, body = failed(error, request.state.id) if isinstance(error, TimeoutError) else _unanswered(error)
        request.state.status = status
        yield f"data: {json.dumps(body)}\n\n".encode()


def _unanswered(error: Exception) -> tuple[int, dict[str, Any]]:
    text = f"vLLM does not answer: {type(error).__name__}. Start it, or try again in a moment."
    return 502, error_body(text, "server_error", "upstream_failed")


def make_proxy(upstream: str, proxy: Proxy, transport: Any = None) -> Guard:
    """Make the application in front of vLLM's server at an address such as http://127.0.0.1:8001."""
    relay = Relay(upstream, proxy, transport)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await relay.close()

    async def unanswered(request: Request, error: Exception) -> Response:
        return respond(*_unanswered(error))

    routes = [Route(path, relay.forward, methods=["POST"]) for path in KINDS]
    routes += [Route(path, relay.probe, methods=["GET"]) for path in ("/v1/models", "/health")]
    app = Starlette(routes=routes, lifespan=lifespan)
    add_errors(app)
    app.add_exception_handler(httpx.HTTPError, unanswered)
    return Guard(app, proxy.tenants, proxy.limits, lambda status: None)
