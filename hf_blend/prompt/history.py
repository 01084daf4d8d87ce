# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The earlier tokens of a conversation that continues in the same cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

UNKNOWN = -1  # id of a token that came as an embedding, or in a forward that no hook saw


@dataclass(frozen=True)
class History:
    """Earlier tokens, `[batch, tokens]`, with padding where a request was shorter or ended earlier."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there are earlier tokens."""
        return self.input_ids is not None

    def rows(self, columns: int | None = None) -> list[list[int]]:
        """The real token ids of each batch entry; with `columns`, of the first columns only."""
        rows: list[list[int]] = []
        if self.input_ids is None or self.attention_mask is None:
            return rows
        for ids, mask in zip(self.input_ids[:, :columns], self.attention_mask[:, :columns], strict=True):
            rows.append(ids[mask.bool()].tolist())
        return rows

    def columns_of(self, known: Sequence[Sequence[int]], tokens: int) -> int:
        """How many first columns of this history a cache of `tokens` columns has; `known` are the ids of its rows."""
        if self.input_ids is None:
            return 0
        columns = min(tokens, self.input_ids.shape[1])
        rows = self.rows(columns)
        if len(rows) != len(known):
            return columns
        for ids, cached in zip(rows, known, strict=True):
            shared = shared_tokens(ids, cached)
            if shared < min(len(ids), len(cached)):
                is_single = len(rows) == 1 and len(ids) == columns
                return shared if is_single else 0
        return columns

    def extended(self, ids: Any, pad_id: int | None, eos_id: int | Sequence[int] | None) -> "History":
        """The history with the answer that `generate` added to it.

        Shapes: ids `[batch, tokens]`.
        """
        if ids is None:
            return History()
        sequences = torch.as_tensor(ids).cpu()
        if sequences.dim() == 1:
            sequences = sequences[None]
        mask = torch.ones_like(sequences)
        known_columns = 0
        if self._begins(sequences) and self.input_ids is not None and self.attention_mask is not None:
            known_columns = self.input_ids.shape[1]
            mask[:, :known_columns] = self.attention_mask
        elif pad_id is not None:  # padding in front is found by its id
            mask = (sequences != pad_id).long().cummax(dim=1).values
        ends = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
        for row, tokens in enumerate(sequences.tolist()):
            last = len(tokens)
            while last > known_columns and tokens[last - 1] == pad_id:
                last -= 1
            if pad_id in ends and last < len(tokens):  # the first of them is the end that the model wrote
                last += 1
            mask[row, last:] = 0
        return History(sequences, mask)

    def _begins(self, sequences: Tensor) -> bool:
        """Whether ids, `[batch, tokens]`, begin with this history."""
        ids = self.input_ids
        return ids is not None and torch.equal(ids, sequences[:, : ids.shape[1]])


def shared_tokens(row: Sequence[int], other: Sequence[int]) -> int:
    """How many first token ids two prompts share."""
    size = min(len(row), len(other))
    differs = np.flatnonzero(np.array(row[:size]) != np.array(other[:size]))
    return int(differs[0]) if len(differs) else size
