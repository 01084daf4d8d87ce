# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The token ids behind the K and V of a cache, as the cache's forwards brought them.

They are recorded on their device, without waiting for it, and copied to the host by `rows`. So a cache knows the ids
of prompts and of answers alike.
"""

from collections.abc import Container
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from ..prefill.request import Request
from ..prompt.history import UNKNOWN

IDS, MASK, POSITIONS = range(3)  # the first axis of what is recorded
MOST_PARTS = 256  # when there are more, they are joined


class CachedTokens:
    """Ids, padding and positions of the tokens in a cache.

    Attributes:
        length: how many columns were recorded.
        is_extended: some tokens came inside `self_extend`, at grouped positions.
    """

    def __init__(self) -> None:
        self.length = 0
        self.is_extended = False
        self._parts: list[Tensor] = []  # `[3, batch, columns]` each

    @classmethod
    def of(cls, ids: Tensor, length: int) -> "CachedTokens":
        """The first ids of `length` tokens, `[batch, known]`, at the positions 0, 1, 2 …; the others are unknown."""
        tokens = cls()
        known = torch.ones((3, *ids.shape), dtype=torch.int64)
        known[IDS] = ids
        known[POSITIONS] = torch.arange(ids.shape[1])
        tokens._parts = [known, known.new_full((3, len(ids), length - ids.shape[1]), UNKNOWN)]
        tokens._parts[1][MASK] = 1
        tokens.length = length
        return tokens

    def append(self, request: Request) -> None:
        """Record the tokens of a forward. Those that came before it unseen, in compiled code, are unknown."""
        self.crop(request.past)
        unseen = request.past - self.length
        new = _record(request)
        if unseen:
            part = new.new_full((3, new.shape[1], unseen), UNKNOWN)
            part[MASK] = 1
            self._parts.append(part)
        self._parts.append(new)
        self.length = request.past + request.width
        if len(self._parts) > MOST_PARTS:
            self._join()

    def crop(self, tokens: int) -> None:
        """Forget all but the first `tokens` columns."""
        if tokens < self.length:
            self._parts = [self._join()[:, :, :tokens]] if tokens else []
            self.length = tokens
            self.is_extended = self.is_extended and tokens > 0

    def select_rows(self, indices: Any) -> None:
        """Keep these rows of the batch, in this order: `[kept]`, numbers or booleans."""
        if self._parts:
            rows = self._join()
            indices = torch.as_tensor(indices, device=rows.device)
            self._parts = [rows[:, indices]]

    def repeat_rows(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times in a row."""
        if self._parts:
            self._parts = [self._join().repeat_interleave(repeats, dim=1)]

    def rows(self, placeholders: Container[int] = ()) -> list[list[int]]:
        """The ids of each row without padding, up to the first token that is unknown, a placeholder or out of order.

        A token is in order at the position of its number: 0, 1, 2 … Asks the device.
        """
        if not self._parts:
            return []
        ids, mask, positions = self._join().cpu()
        is_real = mask != 0
        is_known = (ids != UNKNOWN) & (positions == is_real.cumsum(dim=1) - 1)
        rows = []
        for row, real, known in zip(ids, is_real, is_known, strict=True):
            is_ours = (known | ~real).cumprod(dim=0).bool() & real
            in_order = row[is_ours].tolist()
            rows.append(list(takewhile(lambda token: token not in placeholders, in_order)))
        return rows

    def is_padded(self) -> bool:
        """Whether there is padding among the columns, or may be. Asks the device."""
        return bool(self._parts) and bool((self._join()[MASK] != 1).any())

    def _join(self) -> Tensor:
        """All that was recorded as one tensor, `[3, batch, columns]`."""
        if len(self._parts) > 1:
            batch = self._parts[-1].shape[1]
            device = self._parts[-1].device
            self._parts = [torch.cat([_repeated(part.to(device), batch) for part in self._parts], dim=2)]
        return self._parts[0]


def _repeated(part: Tensor, batch: int) -> Tensor:
    """Rows of a smaller batch for a larger one, as a forward of several rows behind one brings it."""
    return part.expand(-1, batch, -1) if part.shape[1] == 1 else part


def _record(request: Request) -> Tensor:
    """Ids, mask and positions of a forward's tokens, `[3, batch, tokens]`; the mask is -1 where padding may be."""
    ids, mask, width = request.ids, request.mask, request.width
    if ids is None:
        states = request.arguments.get("inputs_embeds")
        batch = 1 if states is None else states.shape[0]
        ids = torch.full((batch, width), UNKNOWN, device=None if states is None else states.device)
    record = torch.ones((3, *ids.shape), dtype=torch.int64, device=ids.device)
    record[IDS] = ids
    if isinstance(mask, Tensor) and mask.dim() == 2:
        record[MASK] = mask[:, -width:]
    elif mask is not None and width > 1 and len(ids) > 1:
        record[MASK] = UNKNOWN
    positions = request.arguments.get("position_ids")
    if positions is None:
        record[POSITIONS] = torch.arange(request.past, request.past + width, device=ids.device)
    else:
        axes = positions.reshape(-1, *positions.shape[-2:])
        is_one = (axes == axes[:1]).all(dim=0)
        record[POSITIONS] = torch.where(is_one, axes[0], UNKNOWN)
    return record
