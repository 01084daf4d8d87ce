# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The requests that wait for a blended prefill: of the tenants in turn, by one worker, between steps of the engine.

A request of which nothing is stored goes to the engine at once. The others are prefilled one by one.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import nn

from ..config import BlendConfig
from ..model.fingerprint import fingerprint
from ..threads import Workers
from .blending import Blender, Prefilled, Reuse, Waiting
from .paged import BlendedPagedCache
from .rounds import Rounds
from .turns import Turns

__all__ = ["BlendedPrefills"]

KEPT_REPORTS = 4096


class BlendedPrefills:
    """The requests that are held back, and the thread that fills their blocks.

    Attributes:
        turns: of that thread.
        outcomes: what the prefills of the last requests cost, by name.
        failures: how many prefills ended in an exception.
    """

    def __init__(self, model: nn.Module, config: BlendConfig, wake: Callable[[], Any]) -> None:
        """`wake` is called from other threads when `advance` has something to do."""
        self._model, self._blender = model, Blender(model, config)
        self.turns = Turns(wake, self._blender.settle)
        self.outcomes: OrderedDict[str, Prefilled] = OrderedDict()
        self.failures = 0
        self._reuse: dict[str, Reuse] = {}  # of the requests that are not over
        self._finished: tuple[str, Reuse] | None = None  # the last one that ended; the engine may put it back
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()
        self._lookups: dict[str, Future[bool]] = {}  # whether something of a prompt is stored
        self._running: Waiting | None = None  # whose blocks are filled now
        self._rounds = Rounds()
        self._finder = Workers("hf_blend-find")

    def fill(self, paged: BlendedPagedCache, stream: Any) -> None:
        """Fill the blocks of this cache, on this stream, from now on."""
        self._blender.paged, self._blender.stream = paged, stream

    def tenant_of(self, request_id: str) -> str:
        """Whose request it is, by the namespace of the store."""
        reuse = self._reuse.get(request_id)
        return "" if reuse is None else reuse.store.namespace

    def expect(self, request_id: str, reuse: Reuse) -> None:
        """A request is about to be added. Called from any thread."""
        self._reuse[request_id] = reuse

    def withdraw(self, request_id: str) -> None:
        """It was not. Called from any thread."""
        self._reuse.pop(request_id, None)

    def offer(self, state: Any) -> None:
        """The engine has a new request, or one that it had to put back into its queue."""
        request_id = state.request_id
        if self._finished is not None and self._finished[0] == request_id:
            self._reuse.setdefault(*self._finished)
        reuse = self._reuse.get(request_id)
        is_held = reuse is not None and reuse.is_blended
        outcome = self.outcomes[request_id] = Prefilled("waiting" if is_held else "plain")
        while len(self.outcomes) > KEPT_REPORTS:
            self.outcomes.popitem(last=False)
        if reuse is not None:
            self._blender.paged.requests[request_id] = reuse.salt, outcome
        if reuse is not None and is_held:
            self._waiting[request_id] = Waiting(state, reuse, outcome)
            self._lookups[request_id] = self._look_up(reuse)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this name was added and is not over."""
        return request_id in self._reuse

    def holds(self, request_id: str) -> bool:
        """Whether the engine may not see a request yet."""
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def stuck_s(self) -> float:
        """For how many seconds the first request that is held has not moved; 0 where none is."""
        first = next(iter(list(self._waiting.values())), None)  # asked from other threads
        return 0.0 if first is None else time.monotonic() - max(first.since, self.turns.moved)

    def finish(self, request_id: str) -> None:
        """A request is over: answered, failed or cancelled; or the engine offers it again."""
        reuse = self._reuse.pop(request_id, None)
        self._finished = None if reuse is None else (request_id, reuse)
        self._waiting.pop(request_id, None)
        self._lookups.pop(request_id, None)
        self._blender.paged.forget(request_id)
        if self._running is not None and self._running.state.request_id == request_id:
            self.turns.cancel()

    def close(self) -> None:
        """All requests are over: end the threads."""
        for table in (self._reuse, self._waiting, self._lookups):
            table.clear()
        self._finished = None
        self._finder.close()
        self.turns.close()

    def advance(self, seconds: float, may_grow: bool) -> list[Waiting]:
        """Between two steps of the engine: let the prefill under way go on, or begin with the next.

        Args:
            seconds: that it may take, up to the next decoder layer; less than 0: none continues.
            may_grow: whether another prompt may take blocks.

        Returns:
            the requests that wait no longer, whatever became of their prefills.
        """
        over = self._looked_up()
        self._begin()
        if seconds >= 0:
            self._blender.may_grow = may_grow
            self.turns.give(seconds)
        request = self._running
        if request is not None and not self.turns.is_busy:
            self._running, request.error = None, self.turns.error
            if self._waiting.get(request.state.request_id) is request:  # else it was cancelled
                over.append(self._let_go(request))
        return over

    def _looked_up(self) -> list[Waiting]:
        """Those of which nothing is stored, or whose look-up failed."""
        over = []
        for request_id, lookup in list(self._lookups.items()):
            request = self._waiting[request_id]
            if request is self._running or not lookup.done():
                continue
            request.error = lookup.exception()
            if request.error is not None or not lookup.result():
                over.append(self._let_go(request))
        return over

    def _let_go(self, request: Waiting) -> Waiting:
        del self._waiting[request.state.request_id], self._lookups[request.state.request_id]
        return request

    def _look_up(self, reuse: Reuse) -> Future[bool]:
        """Look up whether there is something to blend, beside the engine; named documents always are."""
        lookup: Future[bool] = Future()
        if reuse.prompt.known or reuse.pictures:
            lookup.set_result(True)
            return lookup
        try:
            identity = fingerprint(self._model)
            lookup = self._finder.submit(self._blender.has_stored, reuse, identity)
        except Exception as fault:  # no thread can be made, or the model is refused: not the fault of a step
            lookup.set_exception(fault)
        lookup.add_done_callback(lambda _: self.turns.wake())
        return lookup

    def _begin(self) -> None:
        """Begin with the next request, if none is under way."""
        ready = [request for name, request in self._waiting.items() if self._lookups[name].done()]
        if self._running is not None or not ready:
            return
        request = self._running = self._rounds.order(ready, lambda candidate: candidate.tenant)[0]
        self._rounds.serve(request.tenant)
        try:
            request.identity = fingerprint(self._model)
            self.turns.start(lambda: self._blender.fill(request, self.turns))
        except Exception as error:  # no thread can be made
            self.turns.error = error
