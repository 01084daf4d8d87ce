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
    """One forward of the model in which stored KV takes the place of tokens."""

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
