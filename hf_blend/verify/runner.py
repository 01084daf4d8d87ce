# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run checks on a model: all that are registered, or some, in every dtype and with every attention."""

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from .. import plugins
from ..errors import ConfigError, UnsupportedModelError, suggest
from ..model.anatomy import layer_extensions
from ..model.checks import CHECKS, FAILURES
from ..model_names import load_model
from .model_under_test import ModelUnderTest, attending, attentions

logger = logging.getLogger(__name__)
MODULES = ("moved_keys", "stale_tokens", "prefix_cache", "side_effects", "healed_cache")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("eager", "sdpa")


@dataclass(frozen=True)
class MeasuredCheck:
    """A check as it was measured in one dtype with one attention."""

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
    checks: list[MeasuredCheck] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)
    refusal: str | None = None

    @property
    def failed(self) -> list[MeasuredCheck]:
        """The checks that do not hold."""
        return [check for check in self.checks if check.passed is False]

    @property
    def refused(self) -> list[MeasuredCheck]:
        """The checks of something that is refused for this model, by name."""
        return [check for check in self.checks if check.passed is None]

    @property
    def supported(self) -> bool:
        """Whether every check was run and none fails; what is refused by name is not done wrongly."""
        return self.refusal is None and bool(self.checks) and not self.failed

    @property
    def reason(self) -> str | None:
        """Why the model is not supported; None if it is."""
        if self.refusal is not None or not self.failed:
            return self.refusal
        first = self.failed[0]
        error = first.detail or f"the error is {first.max_abs_error}, at most {first.tolerance} is allowed"
        return (
            f"{len(self.failed)} of {len(self.checks)} checks fail, the first is {first.name} in {first.dtype} with "
            f"{first.attention} attention: {error}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "model": self.model, "supported": self.supported, "reason": self.reason,
            "rungs": [asdict(check) for check in self.checks], "floors": self.floors,
        }  # fmt: skip


def check_names() -> dict[str, str]:
    """Every check that is registered, with its claim."""
    for name in MODULES:
        importlib.import_module(f".{name}", __package__)
    plugins.extensions("checks")
    layer_extensions()
    return {name: check.claim for name, check in sorted(CHECKS.items()) if issubclass(ModelUnderTest, check.needs)}


def verify(
    name: str,
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    attention: Sequence[str] = ATTENTIONS,
    checks: Sequence[str] | None = None,
    device: str = "cpu",
    load: Callable[..., nn.Module] = load_model,
    verdict: Verdict | None = None,
) -> Verdict:
    """Run checks on one model, loaded in each dtype; a `verdict` that is given has what is known so far."""
    _refuse_unknown(dtypes, DTYPES)
    _refuse_unknown(attention, ATTENTIONS)
    _refuse_unknown(checks or (), check_names())
    verdict = verdict or Verdict(name)
    try:
        for dtype in dtypes:
            model = load(name, DTYPES[dtype], device)
            try:
                run_checks(verdict, model, dtype, attention, checks, len(dtypes))
            except UnsupportedModelError:
                raise
            except FAILURES as error:
                raise UnsupportedModelError(
                    f"{type(model).__name__} broke before its first check, where plain prefills and a probe are run: "
                    f"{type(error).__name__}: {error} Use full prefill for this model."
                ) from error
    except UnsupportedModelError as error:
        verdict.refusal = str(error)
    return verdict


def _refuse_unknown(given: Sequence[str], names: Collection[str]) -> None:
    for value in given:
        if value not in names:
            raise ConfigError(f"{value!r} cannot be verified. {suggest(str(value), names)}")


def run_checks(
    verdict: Verdict,
    model: nn.Module,
    dtype: str,
    attention: Sequence[str],
    checks: Sequence[str] | None = None,
    rounds: int = 1,
) -> None:
    """Run checks on a model that is loaded, in one of the rounds through all dtypes.

    Where the model can use none of the `attention` that is named, those that it can use take their place.
    """
    implementations = [name for name in attention if name in attentions(model)] or attentions(model)
    total = rounds * len(implementations) * len(checks or check_names())
    for implementation in implementations:
        with attending(model, implementation):
            subject = ModelUnderTest(model)
            verdict.floors.append({"dtype": dtype, "attention": implementation, **asdict(subject.floor)})
            for name in checks or check_names():
                number = len(verdict.checks) + 1
                logger.info("%d of %d: %s in %s with %s attention", number, total, name, dtype, implementation)
                verdict.checks.append(measure(name, subject, dtype, implementation))


def measure(name: str, subject: ModelUnderTest, dtype: str, implementation: str) -> MeasuredCheck:
    """Run one check; one that breaks is one that fails."""
    check_names()
    try:
        result = CHECKS[name].measure(subject)
    except FAILURES as error:
        return MeasuredCheck(name, dtype, implementation, False, None, None, f"{type(error).__name__}: {error}")
    largest = result.error if abs(result.error) < float("inf") else None
    detail = "" if result.passed else result.detail
    return MeasuredCheck(name, dtype, implementation, result.passed, largest, result.tolerance, detail)
