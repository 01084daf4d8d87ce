# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Telling the store which share of each chunk's tokens a request found important, for eviction by importance."""

from bisect import bisect_left
from collections.abc import Sequence

from .plan import Plan

__all__ = ["weigh_chunks"]


def weigh_chunks(plan: Plan, flowing: Sequence[Sequence[int]]) -> None:
    """Weigh the chunks of a forward by the tokens that were chosen to be recomputed.

    Args:
        plan: knows the chunks and the store that they came from.
        flowing: for each batch entry the columns among the new tokens that are computed, ascending.
    """
    if plan.store is None:
        return
    for slot in plan.slots:
        if not slot.exact and slot.tokens:
            columns = flowing[slot.row]
            begin, end = (bisect_left(columns, at) for at in (slot.columns.start, slot.columns.stop))
            plan.store.weigh(slot.chunk.key, len({*columns[begin:end]}) / slot.tokens)
