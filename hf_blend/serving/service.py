# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The engine of a server and the requests under way: each is added, followed token by token, and cancelled."""

import asyncio
import ctypes
import itertools
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from ..model.anatomy import text_config
from ..prompt.pieces import TextPrompt
from .engine import BlendedBatching
from .sampling import DEFAULTS, Sampling
from .structured import Grammars
from .tenants import Tenant, Tenants
from .wire import Generation, Limits, ServiceError, Stopping

logger = logging.getLogger(__name__)

TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # only glibc has it
TRIM_S = 10.0  # between two calls: each takes some milliseconds, and pages have to be mapped again after it


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
        self._outputs = set[asyncio.Queue[Any]]()  # of the engine, for each request under way
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

    async def generate(
        self, tenant: Tenant, generation: Generation, prompt: TextPrompt, sampling: Sampling
    ) -> AsyncGenerator[Running, None]:
        """Let the engine answer; yield the request after each token. Closing the iterator cancels it."""
        run = Running(f"{self._prefix}-{next(self._numbers)}")
        yield run
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._outputs.add(outputs)
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
            self._outputs.discard(outputs)
            if not is_over:
                self.engine.cancel_request(run.name)
                self.engine.forget_handler(run.name)
            self._trim()

    def _trim(self) -> None:
        """Give free memory back to the system now and then: glibc keeps the pages of chunks that are gone."""
        if TRIM is not None and time.monotonic() - self._trimmed > TRIM_S:
            self._trimmed = time.monotonic()
            asyncio.get_running_loop().run_in_executor(None, TRIM, 0)

    def give_up(self) -> None:
        """End what is under way with an error. Called in the event loop."""
        for outputs in self._outputs:
            outputs.put_nowait(None)

    def close(self, patience_s: float = 30.0) -> None:
        """Finish what is under way, stop the engine, and close the stores."""
        self.is_draining = True
        self.engine.stop(timeout=patience_s)
        if self.engine.is_running():
            self.engine.stop(hard_stop=True)
        self.engine.destroy()
        self.tenants.close()
