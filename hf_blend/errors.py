# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong. Every message has four parts: what, got, expected, do.

All errors are `HfBlendError`, and each is also the built-in error that fits, so that callers may catch either.
"""

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class HfBlendError(Exception):
    """Whatever hf_blend refuses; the message says what to do."""


class ConfigError(HfBlendError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class PromptError(HfBlendError, ValueError):
    """The pieces of a prompt do not fit together."""


class PromptLengthError(PromptError):
    """A prompt has more tokens than its model has positions."""


class UnsupportedModelError(HfBlendError, NotImplementedError):
    """The model does something that blending cannot reproduce."""


class StoreError(HfBlendError, OSError):
    """The chunk store cannot be opened, read or written."""


class OffloadError(HfBlendError, OSError):
    """K and V that are away from their device cannot be written, or belong to another process."""


class PluginNotFoundError(HfBlendError, LookupError):
    """No method has that name; the message lists those there are."""


class MissingExtraError(HfBlendError, ImportError):
    """An optional dependency is not installed; the message says how to install it."""


def suggest(wrong: str, names: Iterable[str]) -> str:
    """Say which name was probably meant."""
    available = sorted(names)
    plain = {name.replace("_", "-").lower(): name for name in available}
    near = difflib.get_close_matches(wrong.replace("_", "-").lower(), plain, n=1)
    question = f"Did you mean {plain[near[0]]!r}? " if near else ""
    return f"{question}Available: {', '.join(available) or 'none'}."


def import_extra(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import a module of an optional dependency, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'{needed_by} needs {error.name}, which is not installed: pip install "hf-blend[{extra}]"'
        ) from error
