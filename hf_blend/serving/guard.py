# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What comes before the server's own code: keys, and bodies that are too large, too slow, or never end."""

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .service import Tenants
from .wire import Limits, error_body

Client: TypeAlias = tuple[str, int]


class Doors:
    """Cuts connections that are silent, half sent or kept alive: after a time, and the oldest of too many."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[Client, Any] = {}
        self._waiting: dict[str, OrderedDict[Client, asyncio.TimerHandle]] = {}

    def idle(self, client: Client) -> None:
        """A connection carries no request from now on."""
        transport = self._open.get(client)
        if transport is None:
            return
        row = self._waiting.setdefault(client[0], OrderedDict())
        row[client] = asyncio.get_running_loop().call_later(self._limits.header_s, transport.abort)
        if len(row) > self._limits.connections:
            oldest = next(iter(row))
            self.busy(oldest)
            self._open.pop(oldest).abort()

    def busy(self, client: Client) -> None:
        """A connection carries a request from now on."""
        row = self._waiting.get(client[0], OrderedDict())
        if client in row:
            row.pop(client).cancel()
        if not row:
            self._waiting.pop(client[0], None)

    def guarded(self, protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
        """A protocol whose connections are looked after."""
        doors = self

        class Guarded(protocol):  # type: ignore[valid-type,misc]
            """Tells of its beginning and its end."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                client = transport.get_extra_info("peername")[:2]
                doors._open[client] = transport
                doors.idle(client)
                self._hf_blend_client = client

            def connection_lost(self, exc: Exception | None) -> None:
                doors.busy(self._hf_blend_client)
                doors._open.pop(self._hf_blend_client, None)
                super().connection_lost(exc)

        return Guarded


access = logging.getLogger("hf_blend.serving.access")

PLAIN = re.compile(r"[!-~]{1,128}")  # a client's name for its request, which goes into logs
MOST_PATH = 200
CUT = 499  # as a client that went away
MOST_DIGITS = 18  # of a length; Python refuses to read thousands
RETRY_S = "1"
OPEN = ("/health", "/metrics")  # asked by machines that have no key


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Guard:
    """An ASGI application around another: knows the tenant, and has the whole body, before that is asked."""

    def __init__(self, app: Any, tenants: Tenants, limits: Limits, responded: Callable[[int], None]) -> None:
        self._app, self._tenants, self._limits, self._responded = app, tenants, limits, responded
        self._inside = 0
        self.doors = Doors(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        client = tuple(scope.get("client") or ("", 0))
        self.doors.busy(client)
        try:
            if scope["type"] != "http" or scope["path"] in OPEN:
                await self._app(scope, receive, send)
            else:
                await self._counted(scope, receive, send)
        finally:
            self.doors.idle(client)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, request = scope.setdefault("state", {}), Request(scope, receive)
        given, started = request.headers.get("x-request-id", ""), time.monotonic()
        state["id"] = given if PLAIN.fullmatch(given) else secrets.token_hex(12)

        async def noted(message: Any) -> None:
            if message["type"] == "http.response.start":
                state.setdefault("status", message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["id"].encode())]
            await send(message)

        self._inside += 1
        try:
            async with asyncio.timeout(2 * self._limits.request_s):  # also of one who does not read
                await self._passed(request, noted)
        except (TimeoutError, asyncio.CancelledError):  # the server cuts the connection
            state["status"] = CUT
        finally:
            self._inside -= 1
            if "status" in state:
                self._responded(state["status"])
            tenant, path = state.get("tenant"), ascii(scope["path"][:MOST_PATH])[1:-1]
            access.info(
                "%s %s %s %s %.3f s request=%s tenant=%s",
                scope.get("client", ("-",))[0], scope["method"], path, state.get("status", "-"),
                time.monotonic() - started, state["id"], tenant.name or "-" if tenant else "-",
            )  # fmt: skip

    async def _passed(self, request: Request, send: Send) -> None:
        try:
            if self._inside > 4 * self._limits.requests + 64:  # 429 is said to fewer, behind their bodies
                raise Refused(503, f"{self._inside} requests are here already. Try again in a moment.", "busy")
            tenant = self._tenants.find(request.headers.get("authorization"))
            if tenant is None:
                text = "the API key is missing or wrong. Send 'Authorization: Bearer KEY'."
                raise Refused(401, text, "invalid_api_key")
            request.state.tenant = tenant
            body = await self._body(request)
        except Refused as refused:
            is_stranger = refused.status == 401
            kind = "authentication_error" if is_stranger else "invalid_request_error"
            more = {"www-authenticate": "Bearer"} if is_stranger else {"connection": "close"}
            answer = respond(refused.status, error_body(str(refused), kind, refused.code), more)
            await answer(request.scope, request.receive, send)
            return
        except ClientDisconnect:
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            """Give the body once, and from then on what the client does."""
            return messages.pop() if messages else await request.receive()

        await self._app(request.scope, replay, send)

    async def _body(self, request: Request) -> bytes:
        """All of it."""
        most, length = self._limits.body_bytes, request.headers.get("content-length", "0")
        too_large = Refused(413, f"the body is larger than {most} bytes. Send less.", "request_too_large")
        if length.isdecimal() and (len(length) > MOST_DIGITS or int(length) > most):
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_s):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > most:
                        raise too_large
        except TimeoutError:
            slow = f"the body did not arrive within {self._limits.body_s:g} s. Send it faster."
            raise Refused(408, slow, "request_timeout") from None
        return b"".join(parts)


def respond(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Answer with an error; one that passes says when to ask again."""
    again = {"retry-after": RETRY_S} if status in (429, 503) else {}
    return JSONResponse(body, status, {**again, **(headers or {})})
