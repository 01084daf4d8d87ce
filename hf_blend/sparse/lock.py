# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A selection that holds: lock, checkpoint, unlock, as in KVStar's description of multi-step consistency.

    unlocked ── get ──> locked ── get ──> locked                 the same selection, without looking
                        locked ── checkpoint_interval ──> compare with a new one: kept, or changed
                        locked ── lock_duration, unlock ──> unlocked

The description resets its one step counter at each checkpoint, so that its lock duration is never reached. Here the
age of a selection and the steps since it was last compared are counted apart.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .config import SparseConfig


@dataclass(frozen=True)
class Selection:
    """The blocks that a step attends to, and all tokens from `tail` on."""

    blocks: tuple[int, ...]
    tail: int

    def differences(self, newer: "Selection", block_tokens: int) -> int:
        """How many blocks are in one of two selections only, among the blocks that both could choose."""
        common = min(self.tail, newer.tail) // block_tokens
        return len({block for block in set(self.blocks) ^ set(newer.blocks) if block < common})


@dataclass
class SparseMetrics:
    """Counts of one session: of its locks, then of its steps and rounds, then of blocks that were loaded."""

    locks: int = 0
    unlocks: int = 0
    kept: int = 0
    changed: int = 0
    steps: int = 0
    rounds: int = 0
    full_rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    compared_rounds: int = 0
    equal_rounds: int = 0
    dense_steps: int = 0
    loaded_blocks: int = 0
    prefetched_blocks: int = 0
    loaded_bytes: int = 0


class SelectionLock:
    """The selection of one request in one layer."""

    def __init__(self, config: SparseConfig, metrics: SparseMetrics) -> None:
        self._config, self._metrics = config, metrics
        self.selection: Selection | None = None
        self.age_steps = self.unchecked_steps = 0

    @property
    def is_due(self) -> bool:
        """Whether the next step selects, or compares a selection with its own."""
        if not self._config.lock or self.selection is None:
            return True
        is_old = self.age_steps >= self._config.lock_duration
        return is_old or self.unchecked_steps >= self._config.checkpoint_interval

    def get(self, select: Callable[[], Selection], steps: int = 1) -> Selection:
        """The selection of the next step, which stands for `steps`; `select` makes a new one if one is due."""
        self._metrics.steps += 1
        selection = self._renew(select()) if self.selection is None or self.is_due else self.selection
        self.age(steps)
        return selection

    def age(self, steps: int) -> None:
        """Count steps that used the selection."""
        self.age_steps, self.unchecked_steps = self.age_steps + steps, self.unchecked_steps + steps

    def unlock(self) -> None:
        """Give the selection up."""
        if self.selection is not None:
            self._metrics.unlocks += 1
        self.selection, self.age_steps, self.unchecked_steps = None, 0, 0

    def _renew(self, new: Selection) -> Selection:
        if self.selection is not None and (not self._config.lock or self.age_steps >= self._config.lock_duration):
            self.unlock()
        if self.selection is None:
            self._metrics.locks += 1
        elif self.selection.differences(new, self._config.block_tokens) <= self._config.update_threshold:
            self._metrics.kept += 1
            self.unchecked_steps = 0
            return self.selection
        else:
            self._metrics.changed += 1
        self.selection, self.age_steps, self.unchecked_steps = new, 0, 0
        return new
