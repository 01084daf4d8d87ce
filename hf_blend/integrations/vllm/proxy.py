# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of vLLM: turns the field `documents` of OpenAI's requests into what the connector asks for.

    hf-blend serve --upstream http://127.0.0.1:8001 --model MODEL

A prompt is tokenised here, once: its ids travel with its documents and the salt of its plan, and vLLM takes these ids.
Everything else of a request, and the answer, passes as it is. Tenants are told apart by their keys; only the proxy
knows the secrets with which their salts are made, so vLLM itself must be out of their reach.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...config import BlendConfig
from ...errors import HfBlendError, PromptError
from ...prompt.documents import list_documents
from ...serving.prompts import chat_prompt, text_prompt
from ...serving.service import Tenant, Tenants
from ...serving.wire import error_body
from .plan import plan_salt

__all__ = ["make_proxy"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OURS = ("cache_salt", "kv_transfer_params")  # fields of vLLM that a client does not set
KEPT_HEADERS = ("content-type", "accept")
MOST_BYTES = 4 << 20


class Proxy:
    """What a request becomes before vLLM sees it."""

    def __init__(self, tokenizer: Any, config: BlendConfig, tenants: Sequence[Tenant] = ()) -> None:
        self._tokenizer, self._config = tokenizer, config
        self.tenants = Tenants(list(tenants) or [Tenant()], lambda tenant: None)  # type: ignore[arg-type,return-value]

    def rewrite(self, path: str, body: dict[str, Any], tenant: Tenant) -> dict[str, Any]:
        """The body for vLLM: a prompt with documents as ids, its documents, and the salt of its plan."""
        given = {name: value for name, value in body.items() if name not in (*OURS, "documents")}
        documents = list_documents(body.get("documents"))
        salt = partial(plan_salt, config=self._config, tenant=tenant.name, secret=tenant.secret)
        if not documents:  # no blended block has the salt of an empty plan
            return given | ({"cache_salt": salt((), ())} if tenant.name else {})
        if path == CHAT:
            template = dict(given.get("chat_template_kwargs") or {})
            template |= {"tools": given["tools"]} if given.get("tools") else {}
            prompt = chat_prompt(self._tokenizer, given.get("messages") or [], documents, template=template)
        else:
            prompt = text_prompt(self._tokenizer, _one_prompt(given), documents)
        ids, spans = list(prompt.ids), [list(span) for span in prompt.spans()]
        told: dict[str, Any] = {"documents": spans, "tenant": tenant.name}
        given |= {"prompt": ids} if path == COMPLETIONS else {}
        told |= {"prompt_token_ids": ids} if path == CHAT else {}
        return given | {"kv_transfer_params": told, "cache_salt": salt(ids, spans)}


def make_proxy(upstream: str, proxy: Proxy, transport: Any = None) -> Starlette:
    """Make the application in front of vLLM's server at an address such as http://127.0.0.1:8001."""
    client = httpx.AsyncClient(base_url=upstream, timeout=None, transport=transport)

    async def forward(request: Request) -> Response:
        tenant = proxy.tenants.find(request.headers.get("authorization"))
        if tenant is None:
            return _error(401, "no tenant has this key. Send Authorization: Bearer KEY.")
        body = await request.body()
        if len(body) > MOST_BYTES:
            return _error(413, f"{len(body)} bytes came, at most {MOST_BYTES} are taken. Send fewer.")
        path = request.url.path
        try:
            if request.method == "POST":
                given = json.loads(body)
                if not isinstance(given, dict):
                    raise PromptError(f"the body is {given!r:.60}, expected a JSON object.")
                body = json.dumps(await asyncio.to_thread(proxy.rewrite, path, given, tenant)).encode()
        except (HfBlendError, ValueError, TypeError) as error:
            return _error(400, str(error))
        headers = {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers}
        try:
            sent = client.build_request(request.method, path, content=body, headers=headers)
            answer = await client.send(sent, stream=True)
        except httpx.HTTPError as error:
            return _error(502, f"vLLM does not answer: {type(error).__name__}. Start it, or try again in a moment.")
        kind = answer.headers.get("content-type")
        background = BackgroundTask(answer.aclose)
        return StreamingResponse(answer.aiter_bytes(), answer.status_code, None, kind, background)

    routes = [Route(path, forward, methods=["POST"]) for path in (CHAT, COMPLETIONS)]
    routes += [Route(path, forward, methods=["GET"]) for path in ("/v1/models", "/health")]
    return Starlette(routes=routes)


def _one_prompt(given: dict[str, Any]) -> Any:
    """The prompt of a completion: a text, or token ids."""
    prompt = given.get("prompt")
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(one) is int for one in prompt)):
        raise PromptError(f"prompt is {prompt!r:.60}, expected a text or token ids beside documents. Send one prompt.")
    return prompt


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(message, "invalid_request_error" if status < 500 else "server_error"), status)
