# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an eviction policy is told, and what it promises.

Promises, kept by tests that run over every policy found: victims come in the order of their scores, each name once and
only names that were used and not forgotten; a policy that takes over the state of another gives the same order.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

__all__ = ["EvictionPolicy", "State"]

State = tuple[float, ...]


class EvictionPolicy(ABC):
    """Gives every object a score that changes only when it is used; the lowest leaves first."""

    reads_importance = True  # False: a request need not find out which share of a chunk's tokens was important

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._heap: list[tuple[float, str]] = []  # may hold scores that are out of date; they are passed over

    @abstractmethod
    def updated(self, state: State | None, stamp_s: float, important_ratio: float | None) -> State:
        """What is remembered of an object after a use.

        Args:
            state: after the use before, or None at the first.
            stamp_s: when, in seconds since 1970; grows from use to use, except at a first use.
            important_ratio: share of its tokens that were important, 0 to 1; None if this use told nothing of it.

        Returns:
            Numbers, always as many; the first is the score.
        """

    def use(self, name: str, stamp_s: float, important_ratio: float | None = None) -> None:
        """Count a use of an object; arguments as in `updated`."""
        state = self.updated(self._states.get(name), stamp_s, important_ratio)
        self._states[name] = state
        heapq.heappush(self._heap, (state[0], name))
        if len(self._heap) > 2 * len(self._states) + 64:
            self._rebuild()

    def forget(self, name: str) -> None:
        """Drop an object, if it is known."""
        self._states.pop(name, None)

    def victims(self) -> Iterator[str]:
        """Walk over all objects, the one that should leave first first; nothing may be used or forgotten meanwhile."""
        passed: list[tuple[float, str]] = []
        try:
            while self._heap:
                score, name = heapq.heappop(self._heap)
                if name in self._states and self._states[name][0] == score and (score, name) not in passed[-1:]:
                    passed.append((score, name))
                    yield name
        finally:
            for item in passed:
                heapq.heappush(self._heap, item)

    def states(self) -> dict[str, State]:
        """What is remembered of every object, to be given to `restore` after a restart."""
        return dict(self._states)

    def restore(self, states: Mapping[str, State]) -> None:
        """Take over what was remembered; objects that are not known here, and states that cannot be, are left out."""
        trial = type(self)()
        self._states |= {
            name: state for name, state in states.items() if name in self._states and trial.can_continue(state)
        }
        self._rebuild()

    def can_continue(self, state: State) -> bool:
        """Say whether a state, read from a file that anybody may have written, can be used; changes this policy."""
        try:
            first = self.updated(None, 0.0, None)
            later = [self.updated(state, 0.0, share) for share in (None, 0.5)]
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return False
        return len(state) == len(first) and all(math.isfinite(number) for one in [state, *later] for number in one)

    def _rebuild(self) -> None:
        self._heap = [(state[0], name) for name, state in self._states.items()]
        heapq.heapify(self._heap)
