# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a block method promises: a representation of each block of keys, and scores of a query against them.

Kept by tests that run over every method found: scores are finite, and a function of the block and the query alone (for
a method that `prepare`s, of the context it prepared with, too).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ...errors import ConfigError, suggest


class BlockMethod(ABC):
    """Scores blocks of keys."""

    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options, of which `defaults` fills in the rest."""
        for name in options:
            if name not in self.defaults:
                raise ConfigError(f"{type(self).__name__} has no option {name!r}. {suggest(name, self.defaults)}")
        self.options = {**self.defaults, **options}

    def prepare(self, keys: Tensor) -> Any:
        """Prepare a layer once, from the keys of its first complete blocks; the result goes to the other methods.

        Shapes: keys `[batch, kv_heads, blocks, block_tokens, head_dim]`, rotated for their positions.
        """
        return None

    @abstractmethod
    def represent(self, keys: Tensor, prepared: Any) -> Tensor:
        """Make a smaller representation of each block.

        Shapes: keys `[batch, kv_heads, blocks, block_tokens, head_dim]`, rotated for their positions → `[batch,
        kv_heads, blocks, …]`.
        """

    @abstractmethod
    def score(self, queries: Tensor, blocks: Tensor, prepared: Any) -> Tensor:
        """Score blocks, as `represent` gave them: the more attention queries will give a block, the higher.

        Shapes: queries `[batch, kv_heads, group, rows, head_dim]`, rotated for their positions → `[batch, rows,
        blocks]`.
        """
