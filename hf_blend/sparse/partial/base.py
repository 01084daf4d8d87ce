# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of a way to load chunks in part."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any


class PartialLoader(ABC):
    """Opens stores whose requests load only the part of a chunk that matters to them."""

    @abstractmethod
    def open(self, make: Callable[[Any], Any], folder: Path | None, limits: Any, **settings: Any) -> Any:
        """Open a store.

        Args:
            make: makes a store of a class that derives from `ChunkStore`.
            folder: for what is loaded in part; None keeps it in memory.
            limits: caps, quotas and ages of the store; `bound_blocks` puts a tier under a cap.
            **settings: of the method.

        Returns:
            A store that a `BlendCache` takes.

        Raises:
            ConfigError: a setting is refused.
        """
