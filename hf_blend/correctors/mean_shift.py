# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Move what is not recomputed by what was found at the recomputed tokens of the same chunk (AgentKVShift).

Source: AgentKVShift (arXiv 2607.21604): per layer and chunk, the mean difference of fresh and stored K and V at the
recomputed tokens, added to all others of the chunk.
Differs: keys are compared and moved as they would be at position 0, because the same difference is turned differently
at each place; the weight is an option instead of a bounded divergence; a chunk without a recomputed token stays.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Corrector, LayerView


class MeanShift(Corrector):
    """Mean difference by chunk. Options: `weight` of the shift, `on_keys` and `on_values` (0 leaves them)."""

    defaults: ClassVar[Mapping[str, Any]] = {"weight": 1.0, "on_keys": 1.0, "on_values": 1.0}

    def correct(self, view: LayerView) -> None:
        """Add each chunk's mean difference to its stale tokens."""
        weights = [self.options["weight"] * self.options[name] for name in ("on_keys", "on_values")]
        for state, weight in enumerate(weights):
            if weight:
                self._shift(view, state, weight)

    def _shift(self, view: LayerView, state: int, weight: float) -> None:
        frames = [view.states[state], view.stored[state]]
        fresh, stored = [view.unturned(frame) for frame in frames] if state == 0 else frames
        shift = weight * self._means(view, fresh.float() - stored.float())
        view.charge(4.0 * shift.numel())
        if state == 0:
            shift = view.unturned(shift, True)
        moved = (view.states[state].float() + shift).to(view.states[state].dtype)
        view.states[state].copy_(torch.where(view.stale[:, None, :, None], moved, view.states[state]))

    @staticmethod
    def _means(view: LayerView, difference: Tensor) -> Tensor:
        """At each token the mean of its chunk's recomputed tokens, `[batch, kv_heads, columns, head_dim]` float32."""
        number = view.chunk.clamp_min(0)
        member = torch.nn.functional.one_hot(number, int(number.max()) + 1) * (view.chunk >= 0)[..., None]
        probes = (member * view.fresh[..., None]).float()
        sums = torch.einsum("bhcd,bcn->bhnd", torch.nan_to_num(difference), probes)
        means = sums / probes.sum(dim=1).clamp_min(1)[:, None, :, None]
        return torch.einsum("bhnd,bcn->bhcd", means, member.float())
