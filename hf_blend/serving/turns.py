# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose turn is next, how long it may be, and the thread that runs a model in turns with the engine.

The engine lends that thread the model between two of its steps. Hooks on the decoder layers stop it when its time is
up. What needs no model, such as reading from a store, runs beside the engine. What looks at the model does not:
during a step transformers sets `config.is_causal` to False, and a forward that began then would build another mask.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

from torch import nn

__all__ = ["Rounds", "Share", "TaskCancelled", "Turns"]

T = TypeVar("T")

STEPS = 4.0  # of decoding, whose duration a prefill may take between two: the sooner it ends the more decode together
IDLE_TURN_S = 0.1  # of a prefill while no request decodes; new requests are taken after it


class Rounds:
    """Round robin by tenant: a tenant that waits is served before another is served twice."""

    def __init__(self) -> None:
        self._line: list[str] = []
        self._served: list[str] = []  # since the last call of `order`

    def order(self, requests: Iterable[T], tenant_of: Callable[[T], str]) -> list[T]:
        """Return the first request of each tenant in line, then the second of each, and so on.

        A new tenant comes behind those in line, and one that was served behind all of them. A tenant without a request
        leaves the line.
        """
        queues: dict[str, list[T]] = {}
        for request in requests:
            queues.setdefault(tenant_of(request), []).append(request)
        line = dict.fromkeys([*self._line, *(name for name in queues if name not in self._served), *self._served])
        self._line, self._served = [tenant for tenant in line if tenant in queues], []
        rows = zip_longest(*(queues[tenant] for tenant in self._line))
        return [request for row in rows for request in row if request is not None]

    def serve(self, tenant: str) -> None:
        """Note that a request of this tenant was served: the others come before its next one."""
        self._line = [other for other in self._line if other != tenant]
        self._served.append(tenant)


class Share:
    """How long a turn of a prefill may be: in proportion to the steps of the requests that decode, or `stall_s`."""

    def __init__(self, stall_s: float | None = None) -> None:
        self._stall_s = stall_s
        self._due_s = 0.0

    def turn_s(self, is_decoding: bool) -> float:
        """Return the seconds for the next turn; below 0 if earlier turns took more than their share."""
        if not is_decoding:
            return IDLE_TURN_S
        return self._due_s if self._stall_s is None else self._stall_s

    def note(self, turn_s: float, step_s: float, is_decoding: bool) -> None:
        """Note how long a turn and the step after it took, and whether a request decoded in that step."""
        self._due_s = STEPS * step_s + min(0.0, self._due_s - turn_s) if is_decoding else 0.0


class TaskCancelled(BaseException):
    """Raised inside a task at its next checkpoint after `cancel` or `close`.

    It is no `Exception`: the task runs code of others, which may catch these.
    """


class Turns:
    """One worker thread and the turns that the engine gives it."""

    def __init__(self, wake: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> None:
        """`wake` is called when the engine should look again, `settle` at the end of each turn."""
        self.wake, self._settle = wake, settle
        self._moved = threading.Condition()
        self._task: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self.is_waiting = False  # whether the task waits for a turn
        self._has_turn = self._is_cancelled = self._is_closed = False
        self._deadline = 0.0
        self.error: BaseException | None = None  # what the last task ended with
        self.moved = time.monotonic()  # when a task last began, ended, or reached a checkpoint

    @property
    def is_busy(self) -> bool:
        """Whether a task is under way."""
        return self._task is not None

    def start(self, task: Callable[[], None]) -> None:
        """Begin a task in the worker thread. Called by the engine while no other is under way."""
        with self._moved:
            self._is_cancelled, self.error, self.moved = False, None, time.monotonic()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hf_blend-prefill", daemon=True)
                thread.start()
                self._thread = thread
            self._task = task
            self._moved.notify_all()

    def give(self, seconds: float) -> None:
        """Let the task run, if it waits for a turn, up to its first checkpoint after `seconds` or to a `release`."""
        with self._moved:
            if self.is_waiting:
                self.is_waiting, self._has_turn, self._deadline = False, True, time.monotonic() + seconds
                self._moved.notify_all()
                self._moved.wait_for(lambda: not self._has_turn)

    def cancel(self) -> None:
        """Let the task end at its next checkpoint. Called by the engine."""
        with self._moved:
            self._is_cancelled = True
            self._moved.notify_all()

    def close(self) -> None:
        """Cancel the task, and end the thread."""
        with self._moved:
            self._is_closed = self._is_cancelled = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_closed = False

    def checkpoint(self, end_turn: bool = False) -> None:
        """Hold the turn from here on: wait for one if there is none, or if its time is up. Called by the worker."""
        self.moved = time.monotonic()
        if end_turn or self.moved >= self._deadline:
            self.release()
        with self._moved:
            self.is_waiting = not self._has_turn and not self._is_cancelled
        if self.is_waiting:
            self.wake()
        with self._moved:
            self._moved.wait_for(lambda: self._has_turn or self._is_cancelled)
            self.is_waiting = False
            if self._is_cancelled:
                raise TaskCancelled

    def release(self) -> None:
        """Give up the turn: what follows does not look at the model. Called by the worker."""
        self.moved = time.monotonic()
        if self._has_turn:
            self._settle()
            with self._moved:
                self._has_turn = False
                self._moved.notify_all()

    @contextmanager
    def at_layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Make every decoder layer a checkpoint of this thread."""
        own = threading.get_ident()

        def begin(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == own:
                self.checkpoint()

        handles = [layer.register_forward_pre_hook(begin) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._task is not None or self._is_closed)
                task = self._task
            if task is None:
                return
            failure: BaseException | None = None
            try:
                task()
            except BaseException as error:  # the thread ends by `close` alone, so that `start` need not ask for it
                failure = error
            with self._moved:
                self._task, self.is_waiting, self._has_turn = None, False, False
                self.error, self.moved = failure, time.monotonic()
                self._moved.notify_all()
            self.wake()
