# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loads the blocks that the question's attention to a few probe heads finds important (IMPRESS, FAST 2025)."""

import inspect
import math
from functools import partial
from pathlib import Path
from typing import Any

from ... import plugins
from ...errors import ConfigError, suggest
from .base import PartialLoader
from .loading import PartialLoading
from .store import BLOCK_TOKENS, PartialStore


class Impress(PartialLoader):
    """Blocks of tokens in a tier of their own, beside the chunks as they are."""

    def open(self, store: Any, folder: Path | None, **settings: Any) -> PartialStore:
        """See `PartialLoader.open`.

        Args:
            store: the store behind.
            folder: for the blocks.
            **settings: `share`, `alpha`, `block_tokens`; see `hf_blend.ChunkStore.open`.

        Returns:
            The store in front.
        """
        known = inspect.signature(self._opened).parameters
        for name in settings:
            if name not in known or name in ("store", "folder"):
                raise ConfigError(
                    f"partial has {name!r}, which loading in part does not know. "
                    f"{suggest(name, set(known) - {'store', 'folder'})}"
                )
        return self._opened(store, folder, **settings)

    @staticmethod
    def _opened(
        store: Any, folder: Path | None, share: float = 0.25, alpha: float = 0.6, block_tokens: int = BLOCK_TOKENS
    ) -> PartialStore:
        numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (share, alpha))
        if not numbers or not 0 < share <= 1 or not 0 <= alpha < math.inf:
            raise ConfigError(
                f"partial has share={share!r} and alpha={alpha!r}, expected a share above 0 and up to 1, and an alpha "
                "from 0 on. A quarter of the blocks is partial=0.25."
            )
        if type(block_tokens) is not int or block_tokens < 1:
            raise ConfigError(f"partial has block_tokens={block_tokens!r}, expected a whole number from 1 on. Try 16.")
        tier = plugins.load("store.tiers", "disk")(folder) if folder else plugins.load("store.tiers", "memory")()
        return PartialStore(store, tier, block_tokens, partial(PartialLoading, share=float(share), alpha=float(alpha)))
