# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What of vLLM the connector relies on, checked when an engine starts. vLLM calls this interface experimental.

A method that a version of vLLM names otherwise would never be called, and nothing would say so; an attribute that is
gone would end the engine at a request. Nothing here imports vLLM.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ...errors import ConfigError

__all__ = ["TESTED", "check_version", "missing_attributes", "missing_fields", "missing_methods", "refuse_missing"]

TESTED = ("0.32", "0.33")
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_version(version: str) -> None:
    """Refuse a vLLM whose interface was not read: what its names mean cannot be seen from them."""
    minor = ".".join(version.split(".")[:2])
    if minor not in TESTED:
        raise ConfigError(
            f"BlendConnector does not know vLLM {version}, expected {_expected()}. Install one of these."
        )


def missing_methods(base: type, connectors: Iterable[type]) -> list[str]:
    """Name the public methods of connectors that their base has not, or has with other parameters."""
    missing = []
    for connector in connectors:
        for name, method in vars(connector).items():
            function = getattr(method, "__func__", method)  # of a class method
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            theirs = getattr(base, name, None)
            theirs = getattr(theirs, "__func__", theirs)
            if theirs is None or parameter_names(theirs) != parameter_names(function):
                missing.append(f"{base.__name__}.{name}({', '.join(parameter_names(function)[1:])})")
    return missing


def missing_fields(kind: type, names: Iterable[str]) -> list[str]:
    """Name the fields that a dataclass has not."""
    fields = {field.name for field in dataclasses.fields(kind)}
    return [f"{kind.__name__}.{name}" for name in names if name not in fields]


def missing_attributes(value: object, paths: Iterable[str]) -> list[str]:
    """Name the attributes, such as `model_config.dtype`, that an object has not."""
    missing = []
    for path in paths:
        reached = value
        for name in path.split("."):
            if not hasattr(reached, name):
                missing.append(f"{type(value).__name__}.{path}")
                break
            reached = getattr(reached, name)
    return missing


def refuse_missing(version: str, missing: Iterable[str]) -> None:
    """Refuse a vLLM without names that the connector uses, all of them in one error."""
    names = ", ".join(missing)
    if names:
        raise ConfigError(
            f"vLLM {version} has no {names}, which BlendConnector uses, expected the interface of {_expected()}. "
            "Install one of these as it was released."
        )


def parameter_names(function: Callable[..., Any]) -> list[str]:
    """Name the parameters of a function, without `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind not in _VARIADIC]


def _expected() -> str:
    return " or ".join(f"vLLM {version}" for version in TESTED)
