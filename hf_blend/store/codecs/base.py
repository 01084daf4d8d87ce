# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a codec does with K and V, and what it promises.

Promises, kept by tests that run over every codec found: equal states give equal parts; what is unpacked has the dtype
and the shape of what was packed, and is finite; a codec that says that it is exact gives the same bits back.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Codec", "Part"]


@dataclass(frozen=True)
class Part:
    """The form of one tensor that states are packed into; the suffix, such as ".scale", is that of its name."""

    suffix: str = ""
    axes: int = 3
    tokens_axis: int | None = 1


class Codec(ABC):
    """Packs the states of one layer, `kind` being "k", "v" or "p" (projections).

    The first part has the shape of the states.
    """

    is_exact: ClassVar[bool] = False

    def parts(self, kind: str) -> tuple[Part, ...]:
        """Say which tensors states are packed into, in stored order: one like them if nothing else is said."""
        return (Part(),)

    @abstractmethod
    def pack(self, kind: str, states: Tensor) -> tuple[Tensor, ...]:
        """Pack states into a tensor for each of `parts`.

        Shapes: states `[kv_heads, tokens, head_dim]`, keys rotated for the chunk's own positions.
        """

    @abstractmethod
    def unpack(self, kind: str, packed: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Unpack states from the tensor of each part, by its suffix; raises StoreError where they do not fit together.

        They may be of any size, for an entry says so itself.
        """
