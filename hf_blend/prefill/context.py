# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the parts of one prefill share: known before it begins, and the same until it ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import BlendConfig
from ..model.mixer import Mixer
from .plan import Plan
from .realign import Realigner
from .report import BlendReport


@dataclass(frozen=True)
class PrefillContext:
    """One forward of the model in which stored KV takes the place of tokens.

    Attributes:
        model: the model that runs.
        layers: the cache's layers, holding `past` tokens each.
        plan: which of the new tokens have stored KV.
        past: tokens in the cache.
        config: ratios and check layers.
        report: receives what was chosen and computed.
        realigner: writes stored KV to its columns.
        wanted_rows: how many of the last rows the caller wants an output for.
        beyond_text: the forward brings more than text. Then nothing stored is believed unseen, chunks whose tokens
            see those behind them are computed, and the decoder finds every row between its layers.
        mixers: of the model, by layer; empty where no layer has one.
    """

    model: nn.Module
    layers: Sequence[Any]
    plan: Plan
    past: int
    config: BlendConfig
    report: BlendReport
    realigner: Realigner
    wanted_rows: int
    beyond_text: bool = False
    mixers: Sequence[Mixer | None] = ()
