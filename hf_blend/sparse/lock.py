# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A selection that holds: lock, checkpoint, unlock, as in KVStar's description of multi-step consistency.

    unlocked ── get ──> locked ── get ──> locked                 the same selection, without looking
                        locked ── checkpoint_interval ──> compare with a new one: kept, or changed
                        locked ── lock_duration, unlock ──> unlocked

The description resets its one step counter at each checkpoint, so that its lock duration is never reached. Here the
age of a selection and the steps since it was last compared are counted apart. The requests of a batch are locked
together: they select in the same step, each its own blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import SparseConfig


@dataclass(frozen=True)
class Selection:
    """The blocks that each request attends to, increasing and as many for each, and all tokens from `tail` on."""

    rows: tuple[tuple[int, ...], ...]
    tail: int

    def differences(self, newer: "Selection", block_tokens: int) -> int:
        """How many blocks, of the request with most, are in one of two selections only, of those both could choose."""
        common = min(self.tail, newer.tail) // block_tokens
        most = 0
        for old_blocks, new_blocks in zip(self.rows, newer.rows, strict=True):
            different = set(old_blocks) ^ set(new_blocks)
            most = max(most, sum(block < common for block in different))
        return most

    def columns(self, total: int, block_tokens: int) -> Tensor:
        """The tokens that are attended to in a context of `total` tokens, `[batch, columns]`."""
        starts = torch.tensor(self.rows, dtype=torch.long)[:, :, None] * block_tokens
        inside = (starts + torch.arange(block_tokens)).flatten(1)
        tail = torch.arange(self.tail, total).expand(len(self.rows), -1)
        return torch.cat([inside, tail], dim=1)


@dataclass
class SparseMetrics:
    """Counts of one session: of its locks, then of its steps and rounds."""

    locks: int = 0
    unlocks: int = 0
    kept: int = 0
    changed: int = 0
    steps: int = 0
    rounds: int = 0
    full_rounds: int = 0
    proposed: int = 0
    accepted: int = 0


class SelectionLock:
    """The selection of one layer."""

    def __init__(self, config: SparseConfig, metrics: SparseMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self.selection: Selection | None = None
        self.age_steps = 0
        self.unchecked_steps = 0

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
        selection = self.selection
        if selection is None or self.is_due:
            selection = self._renew(select())
        self.age(steps)
        return selection

    def age(self, steps: int) -> None:
        """Count steps that used the selection."""
        self.age_steps += steps
        self.unchecked_steps += steps

    def unlock(self) -> None:
        """Give the selection up."""
        if self.selection is not None:
            self._metrics.unlocks += 1
        self._set(None)

    def _set(self, selection: Selection | None) -> None:
        self.selection = selection
        self.age_steps = 0
        self.unchecked_steps = 0

    def _renew(self, new: Selection) -> Selection:
        if not self._config.lock or self.age_steps >= self._config.lock_duration:
            self.unlock()
        if self.selection is None:
            self._metrics.locks += 1
            self._set(new)
            return new
        if self.selection.differences(new, self._config.block_tokens) <= self._config.update_threshold:
            self._metrics.kept += 1
            self.unchecked_steps = 0
            return self.selection
        self._metrics.changed += 1
        self._set(new)
        return new
