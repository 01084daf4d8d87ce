# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The earlier tokens of a conversation that continues in the same cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PromptError

UNKNOWN = -1  # id of a token that came as an embedding, or in a forward that no hook saw


@dataclass(frozen=True)
class History:
    """Earlier tokens, `[batch, tokens]`, with padding where a request was shorter or ended earlier."""

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there are earlier tokens."""
        return self.input_ids is not None

    def rows(self) -> list[list[int]]:
        """The real token ids of each batch entry."""
        if self.input_ids is None or self.attention_mask is None:
            return []
        pairs = zip(self.input_ids, self.attention_mask, strict=True)
        return [row[keep.bool()].tolist() for row, keep in pairs]

    def columns_of(self, beginnings: Sequence[Sequence[int]], tokens: int) -> int:
        """How many first columns of this history a cache of `tokens` columns has; its rows begin with `beginnings`."""
        if self.input_ids is None or self.attention_mask is None:
            return 0
        rows = History(self.input_ids[:, :tokens], self.attention_mask[:, :tokens]).rows()
        columns = min(tokens, self.input_ids.shape[1])
        pairs = [*zip(rows, beginnings, strict=True)] if len(rows) == len(beginnings) else []
        shared = [shared_tokens(*pair) for pair in pairs]
        if any(length < min(map(len, pair)) for length, pair in zip(shared, pairs, strict=True)):
            return shared[0] if len(shared) == 1 and len(rows[0]) == columns else 0
        return columns

    def extended(self, ids: Any, pad_id: int | None, eos_id: int | Sequence[int] | None) -> "History":
        """The history with the answer that `generate` added to it.

        Shapes: ids `[batch, tokens]`.
        """
        if ids is None:
            return History()
        sequences = torch.as_tensor(ids).cpu()
        sequences = sequences[None] if sequences.dim() == 1 else sequences
        mask, known_columns = self._known_mask(sequences, pad_id)
        ends = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
        for row, tokens in enumerate(sequences.tolist()):
            last = len(tokens)
            while last > known_columns and tokens[last - 1] == pad_id:
                last -= 1
            mask[row, last + (pad_id in ends and last < len(tokens)) :] = 0
        return History(sequences, mask)

    def _known_mask(self, sequences: Tensor, pad_id: int | None) -> tuple[Tensor, int]:
        """The mask, and how many of its columns are from this history; in others, padding in front is found by id."""
        mask = torch.ones_like(sequences)
        if self.input_ids is not None and self.attention_mask is not None:
            width = self.input_ids.shape[1]
            if torch.equal(self.input_ids, sequences[:, :width]):
                mask[:, :width] = self.attention_mask
                return mask, width
        if pad_id is not None:
            mask = (sequences != pad_id).long().cummax(dim=1).values
        return mask, 0


def shared_tokens(row: Sequence[int], other: Sequence[int]) -> int:
    """How many first token ids two prompts share; an unknown id equals any other."""
    size = min(len(row), len(other))
    ids, others = np.array(row[:size]), np.array(other[:size])
    differs = np.flatnonzero((ids != others) & (ids != UNKNOWN) & (others != UNKNOWN))
    return int(differs[0]) if len(differs) else size


def refuse_other_prompt(ids: Tensor, mask: Tensor | None, tokens: int, rows: Sequence[Sequence[int]], do: str) -> None:
    """Refuse a prompt if its first `tokens` columns, which `generate` skips, are not those that the cache holds.

    Shapes: ids and mask `[prompts, columns]`; `rows` has the ids that the cache begins with, as far as they are known,
    for each prompt, or for each group of prompts that generate made by repeating one.
    """
    if ids.shape[1] <= tokens:
        raise PromptError(
            f"a prompt of {ids.shape[1]} tokens came with a cache that holds {tokens}, but the whole conversation is "
            f"expected, which begins with the tokens that are held. {do}"
        )
    repeats, odd = divmod(len(ids), max(1, len(rows)))
    if odd or not rows:
        return
    cut, real = ids[:, :tokens].cpu(), None if mask is None else mask[:, :tokens].cpu().bool()
    for number, row in enumerate(cut):
        prompt = (row if real is None else row[real[number]]).tolist()
        begins_with = rows[number // repeats]
        at = shared_tokens(prompt, begins_with)
        if at < min(len(prompt), len(begins_with)):
            raise PromptError(
                f"token {at} of the prompt is {prompt[at]}, but the cache holds {begins_with[at]} there, and its "
                f"{tokens} tokens are expected to be the first of the prompt. {do}"
            )
