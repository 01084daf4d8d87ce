# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Between computing and attending: a corrector is shown each layer in which stored KV stands in for tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..correctors.base import KV, Corrector, LayerView
from .plan import Plan
from .realign import Realigner
from .report import BlendReport


class Repair:
    """Calls a corrector on behalf of one forward."""

    def __init__(self, corrector: Corrector, plan: Plan, realigner: Realigner, report: BlendReport) -> None:
        """Prepare for one forward."""
        self._corrector, self._plan, self._realigner, self._report = corrector, plan, realigner, report
        self._stored: dict[int, KV] = {}

    def keep(self, index: int, opened: KV) -> None:
        """Remember what is stored, before anything fresh is written over it.

        Shapes: opened `[batch, kv_heads, columns, head_dim]`.
        """
        if self._corrector.is_active:
            self._stored[index] = (opened[0].clone(), opened[1].clone())

    def apply(self, index: int, opened: KV, flowing: Callable[[], Tensor]) -> None:
        """Correct a layer, once, if it was kept.

        Shapes: flowing `[batch, columns]`.
        """
        stored = self._stored.pop(index, None)
        if stored is None:
            return
        fresh = flowing()
        chunk = torch.full(fresh.shape, -1, device=fresh.device)
        for slot in self._plan.slots:
            if not slot.exact:
                chunk[slot.row, slot.columns] = slot.number
        unturned = lambda keys, back=False: self._realigner.unturned(index, keys, back)  # noqa: E731
        view = LayerView(index, chunk, fresh, stored, opened, unturned, self._report.charge)
        self._corrector.correct(view)
