# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What one prefill works on, and who works with it: what writes stored K and V, and what listens to attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from ..model.attention import AttentionCapture
from ..model.extras import LayerExtra
from ..selectors.base import Selector
from .plan import PlacedChunk, Plan
from .realign import Realigner
from .report import BlendReport
from .request import Request
from .rows import Rows


class StoredStates(Protocol):
    """Writes stored K and V where a prompt has them, and compares them with what the model computes."""

    def write(self, index: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> None:
        """Write a layer of stored chunks into `[…, batch, kv_heads, tokens, head_dim]`, keys realigned."""

    def mismatches(self, layer: int, chunks: Sequence[PlacedChunk], *opened: Tensor) -> list[float]:
        """Give for each chunk how far what is stored is from what was computed, as a share of its size."""


class AttentionListener(Protocol):
    """Receives the attention of a forward, for a store."""

    def capture(self, index: int, module: nn.Module, rows: Rows | None, past: int) -> AttentionCapture | None:
        """The capture of a layer's attention; None where the listener does not need it."""

    def finish(self) -> None:
        """Tell the store, at the end of the forward."""


class PartialLoader(StoredStates, AttentionListener, Protocol):
    """Loads those parts of stored chunks that attention selects: it listens, loads and writes."""

    def begin(self, index: int, rows: Rows | None, plan: Plan) -> None:
        """Find out what of a layer can be loaded in part; no rows: all tokens are computed."""


@dataclass(frozen=True)
class PrefillContext:
    """All that one prefill works on: known before it begins, and shared with its probe."""

    model: nn.Module
    layers: Sequence[Any]
    request: Request
    plan: Plan
    report: BlendReport
    realigner: Realigner
    selector: Selector
    probe: Callable[..., None]  # see `TokenView.probe`
    extras: Sequence[LayerExtra | None] = ()
    loader: PartialLoader | None = None  # None: chunks are written whole
