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

__all__ = ["TaskCancelled", "Turns"]

NEVER = float("inf")


class TaskCancelled(BaseException):
    """Raised inside a task, at the next place where it may be stopped, after `cancel` or `close`.

    No `Exception`: code of others that a task runs may catch these.
    """


class Turns:
    """One worker thread and the turns that the engine gives it."""

    def __init__(
        self,
        wake: Callable[[], Any],
        settle: Callable[[], Any] = lambda: None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.wake, self._settle, self._clock = wake, settle, clock
        self._moved = threading.Condition(new_lock())
        self._task: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self.is_asking = False  # whether the task waits for a turn
        self.has_turn = False  # whether it runs in one, which may have been hurried
        self._is_cancelled = self._is_closed = self._is_stalled = self._is_in_layer = False
        self._deadline = NEVER
        self.turns = 0  # given so far
        self._since = 0.0  # up to when the clock was read in a turn
        self.on_ask: Callable[[], Any] = lambda: None
        self.on_turn: Callable[[float], Any] = lambda seconds: None  # told what a turn took by the clock
        self.error: BaseException | None = None  # what the last task ended with
        self.moved = time.monotonic()  # when a task last began, ended, or came to a place where it may be stopped

    @property
    def is_busy(self) -> bool:
        """Whether a task is under way."""
        return self._task is not None

    @property
    def is_mine(self) -> bool:
        """Whether the thread that asks is the worker."""
        return self._thread is threading.current_thread()

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

    def give(self, seconds: float) -> bool:
        """Let the task run, if it waits for a turn; returns when it reached a layer after `seconds`, or has no use.

        If it is hurried, within a layer, this returns at once: the turn ends with the layer. Whether the task had use
        for the turn is returned.
        """
        with self._moved:
            if not self.is_asking:
                return False
            self.turns += 1
            self.is_asking, self.has_turn, self._deadline = False, True, time.monotonic() + seconds
            self._is_stalled = False
            self._moved.notify_all()
            self._moved.wait_for(lambda: not self.has_turn or (self._is_in_layer and self._deadline == -NEVER))
            return not self._is_stalled

    def hurry(self) -> None:
        """Let a turn under way end at the next layer."""
        with self._moved:
            self._deadline = -NEVER
            self._moved.notify_all()

    def await_end(self, seconds: float) -> None:
        """Wait until the turn is over, but no longer than so."""
        with self._moved:
            self._moved.wait_for(lambda: not self.has_turn, seconds)

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

    def checkpoint(self, end_turn: bool = False) -> None:
        """Have the turn from here on, in the worker; waits where there is none, or where its time is up."""
        self.moved = time.monotonic()
        self._charge()
        if self.has_turn and (end_turn or time.monotonic() >= self._deadline):
            self._is_stalled = end_turn
            self._end_turn()
        with self._moved:
            asks = self.is_asking = not self.has_turn and not self._is_cancelled
            self._moved.notify_all()
        if asks:
            self.on_ask()
            self.wake()
        with self._moved:
            self._moved.wait_for(lambda: self.has_turn or self._is_cancelled)
            self.is_asking = False
            if asks:
                self._since = self._clock()
            if self._is_cancelled:
                raise TaskCancelled

    def release(self) -> None:
        """Give the turn back, in the worker, if it has one: what comes next does not look at the model."""
        self.moved = time.monotonic()
        if self.has_turn:
            self._end_turn()

    @contextmanager
    def at_layers(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Let every decoder layer be a checkpoint for this thread."""
        own = threading.get_ident()

        def begin(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == own:
                self.checkpoint()
                self._is_in_layer = True

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == own:
                self._is_in_layer = False

        handles = [layer.register_forward_pre_hook(begin) for layer in layers]
        handles += [layer.register_forward_hook(end) for layer in layers]
        try:
            yield
        finally:
            self._is_in_layer = False
            for handle in handles:
                handle.remove()

    def _end_turn(self) -> None:
        self._settle()
        with self._moved:
            self._charge()
            self.has_turn = False
            self._moved.notify_all()

    def _charge(self) -> None:
        if self.has_turn:
            before, self._since = self._since, self._clock()
            self.on_turn(self._since - before)

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._task is not None or self._is_closed)
                task = self._task
            if task is None:
                return
            found: BaseException | None = None
            try:
                task()
            except BaseException as error:  # the thread ends by `close` alone, so that `start` need not ask for it
                found = error
            with self._moved:
                self._charge()
                self._task, self.is_asking, self.has_turn = None, False, False
                self.error, self.moved = found, time.monotonic()
                self._moved.notify_all()
            self.wake()
