# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Between HTTP and the engine: who may come in, what is under way, and text from tokens."""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ..errors import HfBlendError
from ..prompt.pieces import TextPrompt
from .engine import BlendedBatching
from .limits import Limits
from .tenants import Tenant, Tenants
from .wire import Generation

__all__ = ["Busy", "Limits", "Running", "Service", "ServiceError"]


logger = logging.getLogger(__name__)


class ServiceError(HfBlendError, RuntimeError):
    """The engine could not answer a request; it serves on."""


class Busy(HfBlendError):
    """More requests are under way than are taken."""


@dataclass
class Running:
    """A request that is under way."""

    name: str
    prompt: TextPrompt
    started: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)


class Service:
    """One engine, its tenants, and the requests under way."""

    def __init__(
        self, engine: BlendedBatching, tokenizer: Any, tenants: Tenants, limits: Limits, name: str, memory: str = "",
        metrics_by_tenant: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.tokenizer, self.tenants, self.limits, self.name = engine, tokenizer, tenants, limits, name
        self.memory, self.metrics_by_tenant = memory, metrics_by_tenant
        self.running: Counter[str] = Counter()  # requests under way, by tenant
        self.is_draining = False
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(4)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        is_moving = self.engine.stuck_s < self.limits.stuck_s
        return self.engine.is_running() and is_moving and not self.is_draining

    @asynccontextmanager
    async def admitted(self, tenant: Tenant) -> AsyncIterator[None]:
        """Count a request while it is under way."""
        own, all_of_them = self.running[tenant.name], self.running.total()
        limit = self.limits.requests if tenant.max_requests is None else tenant.max_requests
        if all_of_them >= self.limits.requests or own >= limit:
            raise Busy(f"{own if own >= limit else all_of_them} requests are under way. Try again in a moment.")
        self.running[tenant.name] += 1
        try:
            yield
        finally:
            self.running[tenant.name] -= 1

    async def generate(self, tenant: Tenant, asked: Generation, prompt: TextPrompt) -> AsyncGenerator[Running, None]:
        """Have the engine answer; gives the request after each token. Whoever stops listening cancels it."""
        run = Running(f"{self._prefix}-{next(self._numbers)}", prompt)
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self.engine.register_result_handler(run.name, outputs.put_nowait)
        is_over = False
        try:
            async with asyncio.timeout(self.limits.request_s):
                self._add(tenant, asked, run)
                while not is_over:
                    output = await outputs.get()
                    is_over = output.is_finished()
                    if output.error:
                        logger.error("request %s failed: %s", run.name, output.error)
                        raise ServiceError(f"request {run.name} failed in the engine; the server's log says why.")
                    run.tokens = output.generated_tokens
                    run.arrived.append(time.perf_counter())
                    yield run
        finally:
            if not is_over:
                self.engine.cancel_request(run.name)
                self.engine.forget_handler(run.name)

    def _add(self, tenant: Tenant, asked: Generation, run: Running) -> None:
        self.engine.add_request(
            run.prompt,
            run.name,
            asked.new_tokens or self.limits.new_tokens,
            store=self.tenants.stores[tenant.name],
            salt=tenant.salt,
            streaming=True,
            temperature=float(asked.temperature),
            top_p=float(asked.top_p),
        )

    def close(self, patience_s: float = 30.0) -> None:
        """Let what is under way come to its end, stop the engine, and close the stores."""
        self.is_draining = True
        self.engine.stop(timeout=patience_s)
        if self.engine.is_running():
            self.engine.stop(hard_stop=True)
        self.engine.destroy()
        self.tenants.close()
