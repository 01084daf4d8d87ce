# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Climb the ladder: every rung, in every dtype and with every attention that is asked for."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .. import plugins
from ..errors import ConfigError, HfBlendError, UnsupportedModelError, suggest
from .base import Check, Outcome
from .floor import attending, attentions
from .subject import ModelUnderTest
from .zoo import load_model

logger = logging.getLogger(__name__)

KIND = "verify"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("eager", "sdpa")
FAILURES = (ArithmeticError, AttributeError, HfBlendError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class RungResult:
    """A rung as it was measured in one dtype with one attention."""

    name: str
    dtype: str
    attention: str
    passed: bool | None
    max_abs_error: float | None
    tolerance: float | None
    detail: str = ""


@dataclass
class Verdict:
    """Whether blending is exact for a model, and how that is known."""

    model: str
    rungs: list[RungResult] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)
    refusal: str | None = None

    @property
    def failed(self) -> list[RungResult]:
        """The rungs that do not hold."""
        return [rung for rung in self.rungs if rung.passed is False]

    @property
    def refused(self) -> list[RungResult]:
        """The rungs about something that is refused for this model, by name."""
        return [rung for rung in self.rungs if rung.passed is None]

    @property
    def supported(self) -> bool:
        """Whether every rung was climbed and none fails; what is refused by name is not done wrongly."""
        return self.refusal is None and bool(self.rungs) and not self.failed

    @property
    def reason(self) -> str | None:
        """Why the model is not supported; None if it is."""
        if self.refusal is not None or not self.failed:
            return self.refusal
        first = self.failed[0]
        error = first.detail or f"the error is {first.max_abs_error}, at most {first.tolerance} is allowed"
        return (
            f"{len(self.failed)} of {len(self.rungs)} rungs fail, the first is {first.name} in {first.dtype} with "
            f"{first.attention} attention: {error}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "model": self.model, "supported": self.supported, "reason": self.reason,
            "rungs": [asdict(rung) for rung in self.rungs], "floors": self.floors,
        }  # fmt: skip


def rung_names() -> dict[str, str]:
    """Every rung, with its claim: the first line of its file."""
    return {name.replace("-", "_"): claim for name, claim in plugins.describe(KIND).items()}


def verify(
    name: str,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    attention: Sequence[str] = ATTENTIONS,
    rungs: Sequence[str] | None = None,
    device: str = "cpu",
    load: Callable[..., nn.Module] = load_model,
) -> Verdict:
    """Climb the ladder with one model."""
    for value, known in [*((one, DTYPES) for one in dtypes), *((one, ATTENTIONS) for one in attention),
                         *((one, rung_names()) for one in rungs or ())]:  # fmt: skip
        if value not in known:
            raise ConfigError(f"{value!r} cannot be verified. {suggest(str(value), known)}")
    verdict = Verdict(name)
    try:
        for dtype in dtypes:
            _climb(verdict, load(name, DTYPES[dtype], device), dtype, attention, rungs)
    except UnsupportedModelError as error:
        verdict.refusal = str(error)
    return verdict


def _climb(verdict: Verdict, model: nn.Module, *how: Any) -> None:
    """Climb, and take what breaks on the way to the first rung for a refusal."""
    try:
        run_checks(verdict, model, *how)
    except UnsupportedModelError:
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} broke before its first rung, where plain prefills and a probe are run: "
            f"{type(error).__name__}: {error} Use full prefill for this model."
        ) from error


def run_checks(
    verdict: Verdict, model: nn.Module, dtype: str, attention: Sequence[str], rungs: Sequence[str] | None = None
) -> None:
    """Measure the rungs on a model that is loaded."""
    for implementation in [one for one in attention if one in attentions(model)]:
        with attending(model, implementation):
            subject = ModelUnderTest(model)
            verdict.floors.append({"dtype": dtype, "attention": implementation, **asdict(subject.floor)})
            for name in rungs or rung_names():
                logger.info("%s in %s with %s attention", name, dtype, implementation)
                verdict.rungs.append(measure(name, subject, dtype, implementation))


def measure(name: str, subject: ModelUnderTest, dtype: str, implementation: str) -> RungResult:
    """Try one rung; one that breaks is one that fails."""
    rung: Check = plugins.load(KIND, name)()
    try:
        outcome = rung.measure(subject)
    except FAILURES as error:
        return RungResult(name, dtype, implementation, False, None, None, f"{type(error).__name__}: {error}")
    return RungResult(name, dtype, implementation, outcome.passed, _finite(outcome), outcome.tolerance, outcome.detail)


def _finite(outcome: Outcome) -> float | None:
    return outcome.error if abs(outcome.error) < float("inf") else None
