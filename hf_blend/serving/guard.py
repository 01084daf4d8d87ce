# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server and a proxy in front of vLLM share before a request is read: keys, bodies, threads, and errors.

Both applications are inside a `Guard`. It knows the tenant and has the whole body, within limits, before they are
called. What they refuse, or fail at, is answered in one form.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import HfBlendError
from .tenants import Tenants
from .wire import Busy, Limits, ServiceError, Stopping, UnknownModelError, error_body

__all__ = [
    "CLIENT_GONE", "PAGES", "Guard", "PromptWorkers", "add_errors", "body_of", "failed", "respond", "while_connected",
]  # fmt: skip

CLIENT_GONE = 499  # nginx's status of a request whose client went away; nobody reads it
MOST_PATH = 200  # characters of a path in the log
MOST_DIGITS = 18  # of a content-length; Python refuses to read thousands
RETRY_S = "1"
PAGES = ("/", "/docs")  # opened by people, whose browsers have no key
OPEN = ("/health", "/metrics", *PAGES)  # the first two are asked by machines that have none
REQUEST_ID = re.compile(r"[!-~]{1,128}")  # of a client: it goes into logs
JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)

logger = logging.getLogger(__name__)
access = logging.getLogger("hf_blend.serving.access")

Client: TypeAlias = tuple[str, int]
Made = TypeVar("Made")

NOBODY: Client = ("-", 0)  # whose connection was reset before its address was read


class Connections:
    """Cuts connections that carry no whole request: after a time, and the oldest of too many of one address."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[Client, Any] = {}
        self._idle: dict[str, OrderedDict[Client, asyncio.TimerHandle]] = {}  # by address

    def idle(self, client: Client) -> None:
        """Note that a connection carries no request from now on."""
        transport = self._open.get(client)
        if transport is None:
            return
        row = self._idle.setdefault(client[0], OrderedDict())
        row[client] = asyncio.get_running_loop().call_later(self._limits.header_s, transport.abort)
        if len(row) > self._limits.connections:
            oldest = next(iter(row))
            self.busy(oldest)
            self._open.pop(oldest).abort()

    def busy(self, client: Client) -> None:
        """Note that a connection carries a request from now on."""
        row = self._idle.get(client[0], OrderedDict())
        if client in row:
            row.pop(client).cancel()
        if not row:
            self._idle.pop(client[0], None)

    def guarded(self, protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
        """Return a protocol that reports the beginning and the end of each connection here."""
        connections = self

        class Guarded(protocol):  # type: ignore[valid-type,misc]
            def connection_made(self, transport: Any) -> None:
                client = (transport.get_extra_info("peername") or NOBODY)[:2]
                self._hf_blend_client = client
                super().connection_made(transport)
                if client != NOBODY:
                    connections._open[client] = transport
                    connections.idle(client)

            def connection_lost(self, exc: Exception | None) -> None:
                connections.busy(self._hf_blend_client)
                connections._open.pop(self._hf_blend_client, None)
                super().connection_lost(exc)

        return Guarded


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Guard:
    """An ASGI application around another: knows the tenant, and has the whole body, before that is called.

    A tenant sends a limited number of bodies at once; beyond it, the one that was silent longest is cut.
    """

    def __init__(self, app: Any, tenants: Tenants, limits: Limits, responded: Callable[[int], None]) -> None:
        """`responded` is called with the status of each response."""
        self._app, self._tenants, self._limits, self._responded = app, tenants, limits, responded
        self._inside = 0
        self._arriving = defaultdict[str, OrderedDict[asyncio.Timeout, int]](OrderedDict)  # bytes of each body so far
        self.connections = Connections(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        client = tuple(scope.get("client") or NOBODY)
        self.connections.busy(client)
        try:
            if scope["type"] != "http" or scope["path"] in OPEN:
                await self._app(scope, receive, send)
            else:
                await self._logged(scope, receive, send)
        finally:
            self.connections.idle(client)

    async def _logged(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with an id, count its response, and write its line of the access log."""
        state, request = scope.setdefault("state", {}), Request(scope, receive)
        request_id, started = request.headers.get("x-request-id", ""), time.monotonic()
        state["id"] = request_id if REQUEST_ID.fullmatch(request_id) else secrets.token_hex(12)

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                state.setdefault("status", message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", state["id"].encode())]
            await send(message)

        self._inside += 1
        try:
            async with asyncio.timeout(2 * self._limits.request_s):  # also of a client that does not read
                await self._checked(request, send_with_id)
        except (TimeoutError, asyncio.CancelledError):  # the server cuts the connection
            state["status"] = CLIENT_GONE
        finally:
            self._inside -= 1
            if "status" in state:
                self._responded(state["status"])
            tenant, path = state.get("tenant"), ascii(scope["path"][:MOST_PATH])[1:-1]
            access.info(
                "%s %s %s %s %.3f s request=%s tenant=%s",
                (scope.get("client") or NOBODY)[0], scope["method"], path, state.get("status", "-"),
                time.monotonic() - started, state["id"], tenant.name or "-" if tenant else "-",
            )  # fmt: skip

    async def _checked(self, request: Request, send: Send) -> None:
        """Check the key, read the body, and call the application, or answer why not."""
        try:
            if self._inside > 4 * self._limits.requests + 64:  # fewer are told 429, after their bodies are read
                raise Refused(503, f"{self._inside} requests are here already. Try again in a moment.", "busy")
            tenant = self._tenants.find(request.headers.get("authorization"))
            if tenant is None:
                text = "the API key is missing or wrong. Send 'Authorization: Bearer KEY'."
                raise Refused(401, text, "invalid_api_key")
            request.state.tenant = tenant
            _check_content_type(request)
            body = await self._body(request, tenant.name)
        except Refused as refused:
            is_stranger = refused.status == 401
            kind = "authentication_error" if is_stranger else "invalid_request_error"
            headers = {"www-authenticate": "Bearer"} if is_stranger else {"connection": "close"}
            answer = respond(refused.status, error_body(str(refused), kind, refused.code), headers)
            await answer(request.scope, request.receive, send)
            return
        except ClientDisconnect:
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # the application may drop it

        async def replay() -> Any:
            """Return the body once, and then what the client sends."""
            return messages.pop() if messages else await request.receive()

        await self._app(request.scope, replay, send)

    async def _body(self, request: Request, tenant: str = "") -> bytes:
        """Read the whole body."""
        most, length = self._limits.body_bytes, request.headers.get("content-length", "0")
        too_large = Refused(413, f"the body is larger than {most} bytes. Send less.", "request_too_large")
        if length.isdecimal() and (len(length) > MOST_DIGITS or int(length) > most):
            raise too_large
        arriving, body = self._arriving[tenant], bytearray()
        try:
            async with asyncio.timeout(self._limits.body_s) as clock:
                arriving[clock] = 0
                self._make_room(arriving)
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
                    arriving[clock] = len(body)
                    arriving.move_to_end(clock)
                    self._make_room(arriving)
        except TimeoutError:
            if clock in arriving:
                slow = f"the body did not arrive within {self._limits.body_s:g} s. Send it faster."
                raise Refused(408, slow, "request_timeout") from None
            many = f"more than {self._limits.bodies} bodies arrive at once, or too many bytes. Send fewer at once."
            raise Refused(429, many, "too_many_requests") from None
        finally:
            arriving.pop(clock, None)
            if not arriving:
                self._arriving.pop(tenant, None)
        return bytes(body)

    def _make_room(self, arriving: OrderedDict[asyncio.Timeout, int]) -> None:
        """Cut bodies until the others are within the limits; the one whose bytes came last stays."""
        most = max(self._limits.arriving_bytes, self._limits.body_bytes)
        while len(arriving) > self._limits.bodies or sum(arriving.values()) > most:
            silent, _ = arriving.popitem(last=False)
            silent.reschedule(asyncio.get_running_loop().time())


def _check_content_type(request: Request) -> None:
    """Refuse a body that is not declared as JSON; only programs may leave the header out, not pages in browsers."""
    media_type = request.headers.get("content-type", "")
    is_left_out = not media_type and "origin" not in request.headers
    if request.method == "POST" and not is_left_out and not JSON_TYPE.fullmatch(media_type.partition(";")[0].strip()):
        text = f"the header content-type is {media_type!r:.80}, expected application/json. Send it with the body."
        raise Refused(415, text, "unsupported_media_type")


async def body_of(request: Request) -> bytes:
    """Return the body of a request behind a `Guard`; the request does not keep it."""
    return b"".join([piece async for piece in request.stream()])


async def while_connected(request: Request, making: Coroutine[Any, Any, Made]) -> Made | None:
    """Return what is made for a request; cancel it and return None if the client goes away first."""
    task, gone = asyncio.ensure_future(making), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class PromptWorkers:
    """Threads that make prompts: those of a tenant one by one, so that no tenant waits for the prompts of others."""

    def __init__(self, tenants: int) -> None:
        self._threads = ThreadPoolExecutor(max(2, tenants), "hf_blend-prompt")
        self._in_turn = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def make(self, tenant: str, make: Callable[[], Made]) -> Made:
        """Make a prompt in a thread. A request that is cancelled ends with its thread, which cannot be stopped."""
        async with self._in_turn[tenant]:
            making = asyncio.wrap_future(self._threads.submit(make))
            making.add_done_callback(lambda made: made.cancelled() or made.exception())  # or asyncio logs a lost error
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                await asyncio.wait([making])
                raise


BROKEN = "the server failed to answer; its log says why, of request {}. Send it again."
LATE = "the request took longer than the server allows. Ask for fewer tokens."
DEEP = "the request is nested too deeply. Send lists and objects of fewer levels."
STATUS: dict[type[BaseException], tuple[int, str, str, str]] = {  # status, type, code, and message if not the error's
    Busy: (429, "rate_limit_error", "too_many_requests", ""),
    UnknownModelError: (404, "invalid_request_error", "model_not_found", ""),
    Stopping: (503, "server_error", "stopping", ""),
    ServiceError: (500, "server_error", "engine_failed", ""),
    TimeoutError: (504, "server_error", "timeout", LATE),
    RecursionError: (400, "invalid_request_error", "bad_request", DEEP),
    HfBlendError: (400, "invalid_request_error", "bad_request", ""),
    Exception: (500, "server_error", "internal_error", BROKEN),
}


def add_errors(app: Any) -> None:
    """Let an application answer what is raised in it."""

    async def http(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return respond(error.status_code, error_body(text, "invalid_request_error"))

    async def ours(request: Request, error: Exception) -> Response:
        return respond(*failed(error, request.state.id))

    app.add_exception_handler(HTTPException, http)
    for kind in STATUS:
        app.add_exception_handler(kind, ours)


def failed(error: BaseException, request_id: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error; one that nobody foresaw is logged."""
    status, kind, code, message = next(row for sort, row in STATUS.items() if isinstance(error, sort))
    if message is BROKEN:
        logger.error("request %s failed", request_id, exc_info=error)
    text = message.format(request_id) or str(error)
    return status, error_body(text, kind, code, getattr(error, "param", None))


def respond(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Answer with an error; one that passes says when to ask again."""
    again = {"retry-after": RETRY_S} if status in (429, 503) else {}
    return JSONResponse(body, status, {**again, **(headers or {})})
