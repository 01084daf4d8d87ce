# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The interface of a way to load chunks in part."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


class PartialLoader(ABC):
    """Puts a store in front of a store, so that requests load only the part of a chunk that matters to them."""

    @abstractmethod
    def open(self, store: Any, folder: Path | None, bound: Callable[..., Any], **settings: Any) -> Any:
        """Put a store in front.

        Args:
            store: the store behind, which keeps every chunk whole.
            folder: for what is loaded in part; None keeps it in memory.
            bound: puts a tier under the store's cap, as `Limits.bound_blocks`.
            **settings: of the method.

        Returns:
            A store that a `BlendCache` takes.

        Raises:
            ConfigError: a setting is refused.
        """

    @abstractmethod
    def forget(self, store: Any, folder: Path, digests: Iterable[str]) -> None:
        """Remove what an earlier `open` kept of chunks that a store now removes.

        Args:
            store: that removes them, with no store in front.
            folder: as in `open`.
            digests: of the chunks.
        """
