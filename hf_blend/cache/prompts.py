# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a blend cache knows of the prompts that it holds or expects."""

from dataclasses import dataclass, field
from typing import Any

from ..prefill.request import PendingPrompt, Request
from ..prompt.history import History

Rows = tuple[tuple[int, ...], ...]


@dataclass
class KnownPrompts:
    """The prompts that a cache expects, and the ids of those that it holds.

    Attributes:
        pending: the prompts that are expected, until their last tokens have come.
        history: their ids and mask, to which `generate` adds an answer.
        beginnings: the ids that each row begins with, held or expected, as far as they are known.
        tokenizer: digest of the one that made the prompts.
        images: of the prompts that are expected, by their names; see `hf_blend.images`.
        notice: for the report of the prompts that are expected.
    """

    pending: PendingPrompt = field(default_factory=PendingPrompt)
    history: History = field(default_factory=History)
    beginnings: Rows = ()
    tokenizer: str = ""
    images: Any = None
    notice: str = ""

    def note_unexpected(self, request: Request) -> None:
        """Note what each row begins with behind a forward that the expected prompts did not come in."""
        self.beginnings = _ids_behind(self.beginnings, request)


def _ids_behind(beginnings: Rows, request: Request) -> Rows:
    """What each row of a cache begins with behind a forward that the expected prompt did not come in, where known.

    No more than what is at the positions 0, 1, 2 …
    """
    if request.others:
        return ()
    most = request.in_order()
    if not request.past:
        return tuple(tuple(row[:most]) for row in request.rows)
    if len(request.rows) != len(beginnings):
        return tuple(ids[: min(request.past, most)] for ids in beginnings) if len(beginnings) == 1 else ()
    pairs = zip(beginnings, request.rows, request.before, strict=True)
    return tuple((*ids[:before], *(row if len(ids) >= before else ()))[:most] for ids, row, before in pairs)
