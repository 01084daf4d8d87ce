# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The queue of requests that wait for a blended prefill: one worker runs them, round robin by tenant, between steps.

A request goes to the engine at once if nothing of its prompt is stored. The others are prefilled one by one.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import nn

from ..config import BlendConfig
from ..model.fingerprint import fingerprint
from .blending import Blender, Prefilled, Request, Reuse
from .paged import BlendedPagedCache
from .turns import Rounds, Turns

__all__ = ["BlendedPrefills"]

KEPT_OUTCOMES = 4096


class BlendedPrefills:
    """The requests under way, which of them the engine may not see yet, and the thread that fills their blocks.

    Attributes:
        turns: of that thread.
        requests: those that the engine has taken from its queue and that are not over, by name.
        outcomes: what the prefills of the last requests cost, by name.
        failures: how many prefills ended in an exception.
    """

    def __init__(self, model: nn.Module, config: BlendConfig, wake: Callable[[], Any]) -> None:
        """`wake` is called from other threads when `advance` has something to do."""
        self._model, self._blender = model, Blender(model, config)
        self.turns = Turns(wake, self._blender.settle)
        self.requests: dict[str, Request] = {}
        self.outcomes: OrderedDict[str, Prefilled] = OrderedDict()
        self.failures = 0
        self._reuse: dict[str, Reuse] = {}  # of all requests that are not over, also those still in the engine's queue
        self._last: tuple[str, Reuse] | None = None  # the request that ended last; the engine may put it back
        self._running: Request | None = None  # whose blocks are filled now
        self._rounds = Rounds()
        self._finder = ThreadPoolExecutor(1, "hf_blend-find")

    def use(self, paged: BlendedPagedCache, stream: Any, spared_tokens: int = 0) -> None:
        """Fill the blocks of this cache, on this stream, from now on.

        Nothing is blended if all of its chunks but `spared_tokens` lie in an exact prefix.
        """
        self._blender.spared_tokens = spared_tokens
        self._blender.paged, self._blender.stream = paged, stream
        paged.requests = self.requests

    def tenant_of(self, request_id: str) -> str:
        """The tenant of a request: the namespace of its store."""
        reuse = self._reuse.get(request_id)
        return "" if reuse is None else reuse.store.namespace

    def expect(self, request_id: str, reuse: Reuse) -> None:
        """Note a request that is about to be added. Called from any thread."""
        self._reuse[request_id] = reuse

    def withdraw(self, request_id: str) -> None:
        """Forget a request that the engine did not accept. Called from any thread."""
        self._reuse.pop(request_id, None)

    def offer(self, state: Any) -> None:
        """Take a new request of the engine, or one that the engine puts back into its queue."""
        request_id = state.request_id
        if self._last is not None and self._last[0] == request_id:
            self._reuse.setdefault(*self._last)
        reuse = self._reuse.get(request_id)
        is_blended = reuse is not None and reuse.is_blended
        outcome = self.outcomes[request_id] = Prefilled("waiting" if is_blended else "plain")
        while len(self.outcomes) > KEPT_OUTCOMES:
            self.outcomes.popitem(last=False)
        if reuse is not None:
            self.requests[request_id] = Request(state, reuse, outcome, self._look_up(reuse) if is_blended else None)

    def knows(self, request_id: str) -> bool:
        """Return whether a request of this name was added and is not over."""
        return request_id in self._reuse

    def holds(self, request_id: str) -> bool:
        """Return whether the engine may not see a request yet."""
        request = self.requests.get(request_id)
        return request is not None and request.lookup is not None

    def __len__(self) -> int:
        return len(self._held())

    @property
    def stuck_s(self) -> float:
        """Seconds since the first request that is held back has moved; 0 if none is held back."""
        waiting = self._held()
        return time.monotonic() - max(waiting[0].since, self.turns.moved) if waiting else 0.0

    def finish(self, request_id: str) -> None:
        """Forget a request that was answered, failed or cancelled, or that the engine is about to put back."""
        reuse = self._reuse.pop(request_id, None)
        self._last = None if reuse is None else (request_id, reuse)
        self.requests.pop(request_id, None)
        if self._running is not None and self._running.state.request_id == request_id:
            self.turns.cancel()

    def close(self) -> None:
        """Forget all requests, and end the threads."""
        self._reuse.clear()
        self.requests.clear()
        self._last = None
        self._finder.shutdown(cancel_futures=True)
        self.turns.close()

    def advance(self, seconds: float, may_grow: bool) -> list[Request]:
        """Give a turn to the prefill that is running, or begin the next one. Called between two steps of the engine.

        Args:
            seconds: how long the turn may be, up to the next decoder layer; below 0 there is none.
            may_grow: whether another prompt may take blocks.

        Returns:
            the requests that are held back no longer, whether their prefills succeeded or not.
        """
        ready = [request for request in self._held() if request.lookup.done() and request is not self._running]  # type: ignore[union-attr]
        released = [request for request in ready if _has_nothing_stored(request)]
        if self._running is None:
            self._begin([request for request in ready if request not in released])
        if seconds >= 0:
            self._blender.may_grow = may_grow
            self.turns.give(seconds)
        request = self._running
        if request is not None and not self.turns.is_busy:
            self._running, request.error = None, self.turns.error
            if self.requests.get(request.state.request_id) is request:  # else it was cancelled
                released.append(request)
        for request in released:
            request.lookup = None
        return released

    def _held(self) -> list[Request]:
        """The requests that are held back, in their order. Called from any thread."""
        return [request for request in list(self.requests.values()) if request.lookup is not None]

    def _look_up(self, reuse: Reuse) -> Future[bool]:
        """Find out in another thread whether anything of a prompt is stored; documents that it names will be."""
        lookup: Future[bool] = Future()
        if reuse.prompt.known or reuse.images:
            lookup.set_result(True)
            return lookup
        try:
            identity = fingerprint(self._model)
            lookup = self._finder.submit(self._blender.has_stored, reuse, identity)
        except Exception as error:  # no thread can be made, or the model is refused: the step must not fail
            lookup.set_exception(error)
        lookup.add_done_callback(lambda _: self.turns.wake())
        return lookup

    def _begin(self, ready: Sequence[Request]) -> None:
        """Start the prefill of the next request, if there is one."""
        if not ready:
            return
        request = self._running = self._rounds.order(ready, lambda candidate: candidate.tenant)[0]
        self._rounds.serve(request.tenant)
        try:
            request.identity = fingerprint(self._model)
            self.turns.start(lambda: self._blender.fill(request, self.turns))
        except Exception as error:  # no thread can be made
            self.turns.error = error


def _has_nothing_stored(request: Request) -> bool:
    """Return whether the look-up of a request found nothing to blend, or failed."""
    lookup: Any = request.lookup
    request.error = lookup.exception()
    return request.error is not None or not lookup.result()
