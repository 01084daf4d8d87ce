# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Between HTTP and the engine: who may come in, what is under way, and text from tokens."""

import asyncio
import ctypes
import hashlib
import hmac
import itertools
import json
import logging
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HfBlendError, PromptError
from ..model.anatomy import text_config
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from .engine import BlendedBatching
from .sampling import DEFAULTS, Sampling
from .structured import Grammars
from .wire import Generation, Limits

LEAST_KEY = 16  # characters of an API key
FIELDS = ("name", "api_key", "secret", "max_requests", "quota_bytes")


@dataclass(frozen=True)
class Tenant:
    """One who may ask."""

    name: str = ""
    api_key: str = ""
    secret: bytes | None = None
    max_requests: int | None = None
    quota_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"  # keys and secrets stay out of logs

    @property
    def salt(self) -> tuple[int, ...]:
        """What keeps the engine's blocks of this tenant from others; empty where there are none."""
        if not self.name:
            return ()
        digest = hmac.new(self.secret or b"", f"hf_blend.salt\0{self.name}".encode(), "sha256").digest()
        return tuple(word >> 1 for word in struct.unpack("<8I", digest))


class Tenants:
    """All who may ask, and their stores."""

    def __init__(self, tenants: Sequence[Tenant], open_store: Callable[[Tenant], ChunkStore]) -> None:
        self._by_key = {_hashed(tenant.api_key): tenant for tenant in tenants}
        self.stores = {tenant.name: open_store(tenant) for tenant in tenants}
        self.needs_key = any(tenant.api_key for tenant in tenants)

    def find(self, header: str | None) -> Tenant | None:
        """Who a request is from."""
        if not self.needs_key:
            return next(iter(self._by_key.values()))
        kind, _, key = (header or "").partition(" ")
        return self._by_key.get(_hashed(key.strip())) if kind.lower() == "bearer" and key.strip() else None

    def close(self) -> None:
        """Close all stores."""
        for store in self.stores.values():
            store.close()


def read_tenants(path: Path) -> list[Tenant]:
    """Read the file of tenants."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tenants in {str(path)!r} cannot be read ({error}). Give a JSON file.") from error
    rows = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f'{str(path)!r} names no tenant, but {{"tenants": [{{…}}]}} with at least one is expected.')
    tenants = [_tenant(row, f"tenant {number} of {str(path)!r}") for number, row in enumerate(rows)]
    for name in ("name", "api_key"):
        values = [getattr(tenant, name) for tenant in tenants]
        if len(set(values)) < len(values):
            raise ConfigError(f"two tenants in {str(path)!r} have the same {name}. Give each its own.")
    return tenants


def check_key(key: Any, what: str) -> str:
    """Refuse a key that headers cannot hold, or that is soon guessed."""
    if not isinstance(key, str) or len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{what} has no api_key of {LEAST_KEY} or more printable characters. Draw one at random.")
    return key


def _tenant(row: Any, what: str) -> Tenant:
    if not isinstance(row, dict) or not set(row) <= set(FIELDS):
        fields = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f"{what} has {fields}, expected fields among {', '.join(FIELDS)}.")
    name, key, secret, *numbers = (row.get(field) for field in FIELDS)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} has no name. Give it one: it is the namespace of its chunks.")
    key = check_key(key, what)
    for number, most in zip(FIELDS[3:], numbers, strict=True):
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"{what} has {number}={most!r}, expected a number from 1 on, or none.")
    try:
        raw = bytes.fromhex(secret) if secret is not None else None
    except (TypeError, ValueError):
        raw = b""
    if raw is not None and len(raw) < 32:
        raise ConfigError(f"{what} has a secret that is not 64 or more hex digits: secrets.token_hex(32) makes one.")
    return Tenant(name, key, raw, *numbers)


def _hashed(key: str) -> bytes:
    """Keys are compared by their hashes: how long that takes says nothing about them."""
    return hashlib.sha256(key.encode()).digest()


logger = logging.getLogger(__name__)

TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc's alone
TRIM_S = 10.0  # between two calls of it, each of some milliseconds, behind which pages have to be made again


class ServiceError(HfBlendError, RuntimeError):
    """The engine could not answer a request; it serves on."""


class Stopping(HfBlendError):
    """The server ends, and waits no longer for what is under way."""


class Busy(HfBlendError):
    """More requests are under way than are taken."""


class UnknownModelError(PromptError):
    """A request names a model that is not served."""


@asynccontextmanager
async def admitted(running: Counter[str], limits: Limits, tenant: Tenant, answers: int = 1) -> AsyncIterator[None]:
    """Count the answers of a request among those under way, by tenant, while it is.

    A tenant that has none under way waits for no other's.
    """
    own, all_of_them = running[tenant.name], running.total()
    limit = limits.requests if tenant.max_requests is None else tenant.max_requests
    if answers > 1 and answers > min(limit, limits.requests):
        raise PromptError(f"{answers} answers were asked for, expected at most {limit}. Ask for fewer at once.")
    if own + answers > limit or (own and all_of_them + answers > limits.requests):
        raise Busy(f"{own if own + answers > limit else all_of_them} requests are under way. Try again in a moment.")
    running[tenant.name] += answers
    try:
        yield
    finally:
        running[tenant.name] -= answers


@dataclass
class Running:
    """A request that is under way."""

    name: str
    started: float = field(default_factory=time.perf_counter)
    begun: float | None = None  # when its prefill began
    tokens: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)


class Service:
    """One engine, its tenants, and the requests under way."""

    def __init__(
        self, engine: BlendedBatching, tokenizer: Any, tenants: Tenants, limits: Limits, name: str, memory: str = "",
        metrics_by_tenant: bool = False, eyes: Any = None,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.tenants, self.limits, self.name = engine, tokenizer, tenants, limits, name
        self.memory, self.metrics_by_tenant, self.eyes = memory, metrics_by_tenant, eyes
        self.running: Counter[str] = Counter()  # requests under way, by tenant
        self.is_draining = False  # if so, no more requests are taken
        self._come = set[asyncio.Queue[Any]]()  # what the engine sends to each request under way
        own, config = engine.model.generation_config, text_config(engine.model)
        defaults = {name: getattr(own, name, None) for name in DEFAULTS}
        self.sampling_defaults = {name: value for name, value in defaults.items() if value is not None}
        self.vocabulary = int(config.vocab_size)
        self.grammars = Grammars(tokenizer, self.vocabulary, sorted(engine.end_tokens))
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)
        self._trimmed = time.monotonic()

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        is_moving = self.engine.stuck_s < self.limits.stuck_s
        return self.engine.is_running() and is_moving and not self.is_draining

    def admitted(self, tenant: Tenant, answers: int = 1) -> AbstractAsyncContextManager[None]:
        """Count the answers of a request while it is under way."""
        return admitted(self.running, self.limits, tenant, answers)

    async def generate(
        self, tenant: Tenant, generation: Generation, prompt: TextPrompt, sampling: Sampling
    ) -> AsyncGenerator[Running, None]:
        """Have the engine answer; gives the request after each token. Whoever stops listening cancels it."""
        run = Running(f"{self._prefix}-{next(self._numbers)}")
        yield run
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._come.add(outputs)
        self.engine.register_result_handler(run.name, outputs.put_nowait)
        is_over = False
        try:
            async with asyncio.timeout(self.limits.request_s):
                self.engine.add_request(
                    prompt,
                    run.name,
                    generation.new_tokens or self.limits.new_tokens,
                    store=self.tenants.stores[tenant.name],
                    salt=tenant.salt,
                    streaming=True,
                    sampling=sampling,
                    eos_token_id=-1 if generation.ignore_eos else None,
                )
                while not is_over:
                    output = await outputs.get()
                    if output is None:
                        raise Stopping("the server ends, and this request took too long for it. Ask another server.")
                    is_over = output.is_finished()
                    if output.error:
                        logger.error("request %s failed: %s", run.name, output.error)
                        raise ServiceError(f"request {run.name} failed in the engine; the server's log says why.")
                    run.begun = output.lifespan[0] if output.lifespan[0] > 0 else run.begun
                    run.tokens = output.generated_tokens
                    run.arrived.append(time.perf_counter())
                    yield run
        finally:
            self._come.discard(outputs)
            if not is_over:
                self.engine.cancel_request(run.name)
                self.engine.forget_handler(run.name)
            self._trim()

    def _trim(self) -> None:
        """Have free memory given back at times: chunks come and go between what stays, and glibc keeps their pages."""
        if TRIM is not None and time.monotonic() - self._trimmed > TRIM_S:
            self._trimmed = time.monotonic()
            asyncio.get_running_loop().run_in_executor(None, TRIM, 0)

    def give_up(self) -> None:
        """End what is under way, with an error that says so. Called in the event loop."""
        for outputs in self._come:
            outputs.put_nowait(None)

    def close(self, patience_s: float = 30.0) -> None:
        """Let what is under way come to its end, stop the engine, and close the stores."""
        self.is_draining = True
        self.engine.stop(timeout=patience_s)
        if self.engine.is_running():
            self.engine.stop(hard_stop=True)
        self.engine.destroy()
        self.tenants.close()
