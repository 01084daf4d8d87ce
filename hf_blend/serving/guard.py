# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What comes before the code of a server, and of a proxy in front of vLLM: keys, bodies, threads, and refusals.

Both are inside a `Guard`: it knows the tenant and has the whole body, within limits, before they are asked. What they
refuse, or fail at, is answered in one form.
"""

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import HfBlendError
from ..threads import Workers
from .service import Busy, ServiceError, Stopping, Tenants, UnknownModelError
from .wire import Limits, error_body

__all__ = ["Guard", "PromptWorkers", "add_errors", "body_of", "failed", "gone", "respond"]

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
                client = (transport.get_extra_info("peername") or NOBODY)[:2]
                self._hf_blend_client = client
                super().connection_made(transport)
                if client != NOBODY:
                    doors._open[client] = transport
                    doors.idle(client)

            def connection_lost(self, exc: Exception | None) -> None:
                doors.busy(self._hf_blend_client)
                doors._open.pop(self._hf_blend_client, None)
                super().connection_lost(exc)

        return Guarded


NOBODY: Client = ("-", 0)  # who reset the connection before anybody asked who it was
access = logging.getLogger("hf_blend.serving.access")

PLAIN = re.compile(r"[!-~]{1,128}")  # a client's name for its request, which goes into logs
MOST_PATH = 200
CUT = 499  # as a client that went away
MOST_DIGITS = 18  # of a length; Python refuses to read thousands
RETRY_S = "1"
OPEN = ("/health", "/metrics")  # asked by machines that have no key
JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json", re.IGNORECASE)

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Guard:
    """An ASGI application around another: knows the tenant, and has the whole body, before that is asked.

    The bodies of a tenant that arrive are so many at once; beyond, the one that was silent longest is cut.
    """

    def __init__(self, app: Any, tenants: Tenants, limits: Limits, responded: Callable[[int], None]) -> None:
        self._app, self._tenants, self._limits, self._responded = app, tenants, limits, responded
        self._inside = 0
        self._arriving = defaultdict[str, OrderedDict[asyncio.Timeout, int]](OrderedDict)  # what came of each body
        self.doors = Doors(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        client = tuple(scope.get("client") or NOBODY)
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
        name, started = request.headers.get("x-request-id", ""), time.monotonic()
        state["id"] = name if PLAIN.fullmatch(name) else secrets.token_hex(12)

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
                (scope.get("client") or NOBODY)[0], scope["method"], path, state.get("status", "-"),
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
            _check_kind(request)
            body = await self._body(request, tenant.name)
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
        del body  # who takes it need not keep it

        async def replay() -> Any:
            """Give the body once, and from then on what the client does."""
            return messages.pop() if messages else await request.receive()

        await self._app(request.scope, replay, send)

    async def _body(self, request: Request, tenant: str = "") -> bytes:
        """All of it."""
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
        """Cut bodies until the others are no more than are taken; the one that came last stays."""
        most = max(self._limits.arriving_bytes, self._limits.body_bytes)
        while len(arriving) > self._limits.bodies or sum(arriving.values()) > most:
            silent, _ = arriving.popitem(last=False)
            silent.reschedule(asyncio.get_running_loop().time())


def _check_kind(request: Request) -> None:
    """Refuse a body that says it is something else than JSON, or that a page of a browser sends without saying."""
    media_type = request.headers.get("content-type", "")
    is_left_out = not media_type and "origin" not in request.headers
    if request.method == "POST" and not is_left_out and not JSON_TYPE.fullmatch(media_type.partition(";")[0].strip()):
        text = f"the header content-type is {media_type!r:.80}, expected application/json. Send it with the body."
        raise Refused(415, text, "unsupported_media_type")


async def body_of(request: Request) -> bytes:
    """The body of a request behind a `Guard`, which the request keeps no longer."""
    return b"".join([piece async for piece in request.stream()])


async def gone(request: Request) -> None:
    """Return when the client went away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class PromptWorkers:
    """Threads in which prompts are made: those of a tenant one by one, so that none waits for those of others."""

    def __init__(self, tenants: int) -> None:
        self._threads = Workers("hf_blend-prompt", max(2, tenants))
        self._in_turn = defaultdict[str, asyncio.Lock](asyncio.Lock)

    async def make(self, tenant: str, make: Callable[[], Made]) -> Made:
        """Make it in a thread. Who goes away meanwhile counts as a request until then: a thread cannot be stopped."""
        async with self._in_turn[tenant]:
            making = asyncio.wrap_future(self._threads.submit(make))
            making.add_done_callback(lambda made: made.cancelled() or made.exception())  # of who left, nobody asks
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                await asyncio.wait([making])
                raise


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


def add_errors(app: Any) -> None:
    """Have an application answer what is raised in it."""

    async def http(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.url.path}: {error.detail}."
        return respond(error.status_code, error_body(text, "invalid_request_error"))

    async def ours(request: Request, error: Exception) -> Response:
        return respond(*failed(error, request.state.id))

    app.add_exception_handler(HTTPException, http)
    for kind in STATUS:
        app.add_exception_handler(kind, ours)


def failed(error: BaseException, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and the body that say what went wrong."""
    status, kind, code = next(row for sort, row in STATUS.items() if isinstance(error, sort))
    return status, error_body(_message(error, request_id), kind, code, getattr(error, "param", None))


def _message(error: BaseException, request_id: str) -> str:
    if isinstance(error, TimeoutError):
        return "the request took longer than the server allows. Ask for fewer tokens."
    if isinstance(error, RecursionError):
        return "the request is nested too deeply. Send lists and objects of fewer levels."
    if isinstance(error, HfBlendError):
        return str(error)
    logger.error("request %s failed", request_id, exc_info=error)
    return f"the server failed to answer; its log says why, of request {request_id}. Send it again."


def respond(status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Answer with an error; one that passes says when to ask again."""
    again = {"retry-after": RETRY_S} if status in (429, 503) else {}
    return JSONResponse(body, status, {**again, **(headers or {})})
