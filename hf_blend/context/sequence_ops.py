# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What can be done to the sequences of a cache: remove, copy, keep, shift and divide, by ranges of positions."""

from abc import ABC, abstractmethod

import torch

from ..errors import ConfigError
from .cells import Cells


class SequenceOps(ABC):
    """The operations, for a class that lays the result out when it is next needed."""

    def __init__(self) -> None:
        """Begin with sequence 0, empty and active."""
        self.active = 0
        self._cells = Cells()
        self._ids = torch.empty(0, dtype=torch.long)  # by cell

    @abstractmethod
    def _changed(self) -> None:
        """Some sequence is not what it was."""

    @property
    def sequences(self) -> list[int]:
        """The sequences that were ever written to and not forgotten, in increasing order."""
        return list(self._cells)

    def tokens(self, sequence: int | None = None) -> list[int]:
        """The token ids of a sequence in the order in which attention sees them; -1 where they are not known."""
        return self._ids[self._cells.row(self._number(sequence))[0]].tolist()

    def positions(self, sequence: int | None = None) -> list[int]:
        """The positions of a sequence's tokens, in the same order."""
        return self._cells.row(self._number(sequence))[1].tolist()

    def use(self, sequence: int) -> None:
        """Let the next forward continue a sequence."""
        self.active = self._number(sequence)
        self._changed()

    def remove(self, sequence: int | None = None, start: int = 0, stop: int | None = None) -> None:
        """Forget tokens at positions `start <= p < stop`.

        Args:
            sequence: of which sequence; None is every one.
            start: first position.
            stop: position behind the last; None is the end.
        """
        self._cells.remove(sequence, start, stop)
        self._changed()

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Let `target` hold the tokens of `source` at positions `start <= p < stop` too, sharing the storage."""
        self._cells.copy(self._number(source), self._number(target), start, stop)
        self._changed()

    def keep(self, sequence: int) -> None:
        """Forget every sequence but one, and continue that."""
        self._cells.keep(self._number(sequence))
        self.use(sequence)

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move tokens at positions `start <= p < stop` by `delta`; those that would go below 0 are forgotten."""
        self._cells.shift(self._number(sequence), start, stop, delta)
        self._changed()

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start <= p < stop` by a whole number from 1 on, rounding down.

        Raises:
            ConfigError: the number is below 1.
        """
        self._cells.divide(self._number(sequence), start, stop, by)
        self._changed()

    def _number(self, sequence: int | None) -> int:
        if sequence is None:
            return self.active
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
            raise ConfigError(f"a sequence is named {sequence!r}, but a number from 0 on is wanted.")
        return sequence
