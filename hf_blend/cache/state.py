# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The state of one blend cache. The parts of a cache share it, and it refers to none of them."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..config import BlendConfig
from ..errors import ConfigError
from ..model.author import Author, author_of, refuse_other_author
from ..prefill.report import BlendReport
from ..prefill.request import PendingPrompt
from ..prompt.history import History
from ..selectors.base import Selector
from ..store import ChunkStore
from .cached_tokens import CachedTokens
from .kv_layers import KVLayers
from .model_info import ModelInfo

ASK_AGAIN = (
    "Pass the whole conversation by inputs(history=…), inputs_from_messages or inputs_from_text: what the cache "
    "cannot keep of it is computed again. Or reset() the cache."
)


@dataclass
class BlendState:
    """The settings, the K and V, and the prompts of one cache.

    Attributes:
        selector: chooses the tokens that are recomputed.
        recipe: where the settings come from, in words.
        chunk_prefix_ids: the ids before each chunk while it is computed alone.
        report: what the last prefill cost.
        tokens: what is known of the tokens that are cached.
        pending: the prompts that the next forwards are expected to bring.
        history: the ids of the prompts that were built last, to which `generate` adds an answer.
        author: the model as it was when it computed K and V; None: nothing is computed.
        inexact_from: the first column whose K and V are not those of a full prefill; None: all are.
        healing: the second cache of `heal`, while it is not done.
        is_recording: assisted decoding has begun, whose steps bring several tokens.
        is_prompt_open: the cached tokens may be the first part of a prompt: no answer is behind them.
        is_cut: a forward failed after it may have advanced the state of a layer, which cannot be undone.
        check_ms: time in which the model was checked, until a report says it.
        loader: loads chunks in part, where the store does.
    """

    model: nn.Module
    store: ChunkStore
    config: BlendConfig
    info: ModelInfo
    selector: Selector
    recipe: str
    chunk_prefix_ids: tuple[int, ...]
    kv: KVLayers
    report: BlendReport
    tokens: CachedTokens = field(default_factory=CachedTokens)
    pending: PendingPrompt = field(default_factory=PendingPrompt)
    history: History = field(default_factory=History)
    author: Author | None = None
    inexact_from: int | None = None
    healing: Any = None
    is_recording: bool = False
    is_prompt_open: bool = True
    is_cut: bool = False
    check_ms: float = 0.0
    loader: Any = None

    def set_author(self, past: int) -> Author:
        """Make the model as it is now the author of new K and V; ConfigError if another computed the `past` tokens."""
        author = author_of(self.model)
        if past:
            refuse_other_author(self.author, author, past, ASK_AGAIN)
        self.author = author
        return author

    def mark_inexact(self, column: int) -> None:
        """A prompt is blended: its first token without exact K and V is at `column`."""
        self.inexact_from = column if self.inexact_from is None else min(self.inexact_from, column)

    def inexact_tokens(self) -> int:
        """How many cached tokens are not those of a full prefill."""
        return 0 if self.inexact_from is None else self.kv.length - self.inexact_from

    def crop_tokens(self, length: int) -> None:
        """The cache was cropped to its first `length` columns."""
        self.tokens.crop(length)
        if self.inexact_from is not None and length <= self.inexact_from:
            self.inexact_from = None
        is_ahead = self.healing is not None and self.healing.reached > length
        if self.inexact_from is None or is_ahead:
            self.healing = None

    def rollback_partial_forward(self) -> None:
        """Remove the tokens of a forward that ended between two layers.

        Raises ConfigError where a window or a state has advanced behind them.
        """
        if self.is_cut:
            raise ConfigError(
                "a forward ended between two layers, and a state that has moved on cannot be taken back. reset() the "
                "cache and pass the whole conversation."
            )
        if self.kv.rollback_partial_forward():
            self.crop_tokens(self.kv.length)

    def forget(self) -> None:
        """The cache was emptied."""
        self.crop_tokens(0)
        self.pending = PendingPrompt()
        self.author = None
        self.is_cut = False
        self.is_recording = False
        self.is_prompt_open = True
