# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sharpen or flatten attention over what is not recomputed (APE's temperature and scale).

Source: APE (arXiv 2502.05431): attention over chunks computed apart from each other is taken at a temperature below 1,
and its total weight is scaled.
Differs: both are put into the stored keys, so that every attention function and every later token sees them. The
temperature divides the keys. The scale cannot be put there exactly: it would be a constant added to the scores.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .base import Corrector, LayerView


class Temperature(Corrector):
    """Divides stale keys. Option `temperature`: below 1 sharpens, above 1 flattens."""

    defaults: ClassVar[Mapping[str, Any]] = {"temperature": 0.9}

    def correct(self, view: LayerView) -> None:
        """Scale the keys that are not fresh."""
        keys = view.states[0]
        scaled = (keys.float() / self.options["temperature"]).to(keys.dtype)
        view.charge(float(keys.numel()))
        keys.copy_(torch.where(view.stale[:, None, :, None], scaled, keys))
