# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the blocks that the question's attention to a few probe heads finds important (IMPRESS, FAST 2025)."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from ...errors import ConfigError, suggest
from .loading import FALLBACKS, PartialLoading
from .store import BLOCK_TOKENS, PartialStore


def open_partial(settings: Mapping[str, Any], *given: Any, **named: Any) -> PartialStore:
    """Open a store whose chunks are loaded in part, with the arguments of a store.

    The settings are those of `partial` in `hf_blend.ChunkStore.open`.
    """
    known = set(inspect.signature(_checked).parameters)
    for name in settings:
        if name not in known:
            raise ConfigError(f"partial has {name!r}, which loading in part does not know. {suggest(name, known)}")
    share, alpha, block_tokens, reorder, fallback = _checked(**settings)
    loader = partial(PartialLoading, share=share, alpha=alpha, fallback=fallback)
    return PartialStore(*given, **named).load_in_part(block_tokens, loader, reorder)


def _checked(
    share: float = 0.25,
    alpha: float = 0.6,
    block_tokens: int = BLOCK_TOKENS,
    reorder: bool = True,
    fallback: str = "whole",
) -> tuple[float, float, int, bool, str]:
    """Refuse settings that cannot be."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (share, alpha))
    if not numbers or not 0 < share <= 1 or not 0 <= alpha < math.inf:
        raise ConfigError(
            f"partial has share={share!r} and alpha={alpha!r}, expected a share above 0 and up to 1, and an alpha "
            "from 0 on. A quarter of the blocks is partial=0.25."
        )
    if type(block_tokens) is not int or block_tokens < 1:
        raise ConfigError(f"partial has block_tokens={block_tokens!r}, expected a whole number from 1 on. Try 16.")
    if not isinstance(reorder, bool):
        raise ConfigError(f"partial has reorder={reorder!r}, expected True or False.")
    if fallback not in FALLBACKS:
        raise ConfigError(f"partial has fallback={fallback!r}. {suggest(str(fallback), FALLBACKS)}")
    return float(share), float(alpha), block_tokens, reorder, fallback
