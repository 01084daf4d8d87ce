# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What was said before in a conversation that goes on in the same cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class History:
    """What was said before, with padding wherever a request of the batch was shorter or done earlier."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether anything was said."""
        return self.input_ids is not None

    def rows(self) -> list[list[int]]:
        """The real token ids of each batch entry."""
        if self.input_ids is None or self.attention_mask is None:
            return []
        pairs = zip(self.input_ids, self.attention_mask, strict=True)
        return [row[keep.bool()].tolist() for row, keep in pairs]

    def extended(self, ids: Any, pad_id: int | None, eos_id: int | Sequence[int] | None) -> "History":
        """The history that ends with what `generate` has made of this one.

        Shapes: ids `[batch, tokens]`.
        """
        if ids is None:
            return History()
        given = torch.as_tensor(ids).cpu()
        given = given[None] if given.dim() == 1 else given
        mask, known = self._known_mask(given, pad_id)
        ends = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
        for row, tokens in enumerate(given.tolist()):
            last = len(tokens)
            while last > known and tokens[last - 1] == pad_id:
                last -= 1
            mask[row, last + (pad_id in ends and last < len(tokens)) :] = 0
        return History(given, mask)

    def _known_mask(self, given: Tensor, pad_id: int | None) -> tuple[Tensor, int]:
        """The mask and how far it is known; where it is not, padding in front is told by its id."""
        mask = torch.ones_like(given)
        if self.input_ids is not None and self.attention_mask is not None:
            width = self.input_ids.shape[1]
            if torch.equal(self.input_ids, given[:, :width]):
                mask[:, :width] = self.attention_mask
                return mask, width
        if pad_id is not None:
            mask = (given != pad_id).long().cummax(dim=1).values
        return mask, 0
