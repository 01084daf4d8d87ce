# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a rung is: one claim, measured on one model.

The first line of a rung's file is its claim. A rung measures an error and says what is allowed, and where that comes
from: 0 where the claim is about bits, else the measured floor or a count of roundings, never a number that happened
to pass. A rung must be able to fail: where a claim could hold because nothing happened, it checks that something did.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..errors import UnsupportedModelError
from .subject import ModelUnderTest


@dataclass(frozen=True)
class Outcome:
    """What a rung measured.

    Attributes:
        error: a largest absolute difference, or a number of violations.
        tolerance: the largest error at which the claim holds.
        detail: what was found, for people; empty where there is nothing to add.
        refused: whether the model is refused what the claim is about, for the reason in `detail`.
    """

    error: float
    tolerance: float
    detail: str = ""
    refused: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether the claim holds; an error that is not a number does not. None: nothing is claimed of this model."""
        return None if self.refused else self.error <= self.tolerance


class Check(ABC):
    """A claim about blending."""

    @abstractmethod
    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Try the claim.

        Args:
            subject: the model and its requests; the model must be left as it was.

        Returns:
            The error and what is allowed.
        """


def violations(found: list[str]) -> Outcome:
    """The outcome of a claim that holds or not: the number of things that are wrong, of which none is allowed.

    Args:
        found: what is wrong, a few words each.

    Returns:
        The outcome.
    """
    return Outcome(float(len(found)), 0.0, "; ".join(found[:3]))


def refused(error: UnsupportedModelError) -> Outcome:
    """The outcome of a claim about something that is refused for the model, by name, before anything wrong is done.

    Args:
        error: the refusal.

    Returns:
        The outcome, which neither holds nor fails.
    """
    return Outcome(float("inf"), 0.0, str(error), refused=True)


def rounding(dtype: torch.dtype, roundings: int, moves: int = 0) -> float:
    """Bound on what rounding does to keys, as a share of the largest one.

    A pair that turns can be larger than its members by the square root of 2, and one rounding to nearest costs half an
    eps. A move composes tables and turns in float32, about 16 roundings, and rounds once to the dtype.

    Args:
        dtype: of the keys.
        roundings: how often a key was rounded to it by the model, besides the moves.
        moves: how often the keys were realigned.

    Returns:
        The bound.
    """
    eps, fine = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return 2**0.5 * ((roundings + moves) * eps + 16 * moves * fine) / 2
