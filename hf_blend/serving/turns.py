# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A thread that runs a model in turns with the engine: it stops at each decoder layer when its time is up.

The engine lends it the model between two of its steps; hooks on the decoder layers are the places where it may be
stopped. What needs no model, such as reading from a store, runs beside the engine. What looks at the model does not:
during a step transformers sets `config.is_causal` to False, and a forward that began then would build another mask.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..threads import new_lock

__all__ = ["Share", "TaskCancelled", "Turns"]

STEPS = 4.0  # of those that decode, for as long as which a prefill runs between two: then more decode together
IDLE_TURN_S = 0.1  # of a prefill while nobody decodes; new requests are looked for behind it


class Share:
    """How long a turn may be beside those that decode: in proportion to their steps, or `stall_s`."""

    def __init__(self, stall_s: float | None = None) -> None:
        self._stall_s = stall_s
        self._due_s = 0.0

    def turn_s(self, is_decoding: bool) -> float:
        """Seconds for the next turn; less than 0 where turns took more than was due."""
        return IDLE_TURN_S if not is_decoding else self._due_s if self._stall_s is None else self._stall_s

    def note(self, turn_s: float, step_s: float, is_decoding: bool) -> None:
        """What a turn took, and the step behind it; whether anybody decoded in that."""
        self._due_s = STEPS * step_s + min(0.0, self._due_s - turn_s) if is_decoding else 0.0


class TaskCancelled(BaseException):
    """Raised inside a task, at the next place where it may be stopped, after `cancel` or `close`.

    No `Exception`: code of others that a task runs may catch these.
    """


class Turns:
    """One worker thread and the turns that the engine gives it."""

    def __init__(self, wake: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> None:
        """`wake` is called when the engine should look again, `settle` at the end of each turn."""
        self.wake, self._settle = wake, settle
        self._moved = threading.Condition(new_lock())
        self._task: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self.is_asking = False  # whether the task waits for a turn
        self._has_turn = self._is_cancelled = self._is_closed = False
        self._deadline = 0.0
        self.error: BaseException | None = None  # what the last task ended with
        self.moved = time.monotonic()  # when a task last began, ended, or came to a place where it may be stopped

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
        """Let the task run, if it waits for a turn, until it is at a layer after `seconds`, or has no use for more."""
        with self._moved:
            if self.is_asking:
                self.is_asking, self._has_turn, self._deadline = False, True, time.monotonic() + seconds
                self._moved.notify_all()
                self._moved.wait_for(lambda: not self._has_turn)

    def cancel(self) -> None:
        """Let the task end at the next place where it may be stopped. Called by the engine."""
        with self._moved:
            self._is_cancelled = True
            self._moved.notify_all()

    def close(self) -> None:
        """Cancel what is under way, and end the thread."""
        with self._moved:
            self._is_closed = self._is_cancelled = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._is_closed = False

    def checkpoint(self, end_turn: bool = False) -> None:
        """Have the turn from here on, in the worker; waits where there is none, or where its time is up."""
        self.moved = time.monotonic()
        if end_turn or self.moved >= self._deadline:
            self.release()
        with self._moved:
            self.is_asking = not self._has_turn and not self._is_cancelled
        if self.is_asking:
            self.wake()
        with self._moved:
            self._moved.wait_for(lambda: self._has_turn or self._is_cancelled)
            self.is_asking = False
            if self._is_cancelled:
                raise TaskCancelled

    def release(self) -> None:
        """Give the turn back, in the worker, if it has one: what comes next does not look at the model."""
        self.moved = time.monotonic()
        if self._has_turn:
            self._settle()
            with self._moved:
                self._has_turn = False
                self._moved.notify_all()

    @contextmanager
    def at_layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Let every decoder layer be a checkpoint for this thread."""
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
                self._task, self.is_asking, self._has_turn = None, False, False
                self.error, self.moved = failure, time.monotonic()
                self._moved.notify_all()
            self.wake()
