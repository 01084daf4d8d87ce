# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`ShiftCache`: generation past the model's window with a bounded cache, as llama.cpp's context shift does it.

    cache = ShiftCache(model, keep_tokens=4)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=100_000)

When the window is full, the first tokens are kept, the older half of the rest is dropped, and what remains moves up:
its keys are turned to their new positions. What the dropped tokens did to the remaining keys and values stays in them.
"""

from torch import nn

from ..errors import ConfigError, PromptError
from ..model.anatomy import text_config
from .sequence_cache import SequenceCache


class ShiftCache(SequenceCache):
    """A `SequenceCache` that never holds more tokens than a window.

    A prompt longer than the window is read in parts with `generate(..., prefill_chunk_size=…)`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window_tokens: int | None = None,
        keep_tokens: int = 4,
        kv_bits: int | None = None,
        allow_unverified: bool = False,
    ) -> None:
        """Begin empty.

        Args:
            model: a causal language model whose keys can be moved.
            window_tokens: most tokens that the cache holds; None is the model's `max_position_embeddings`; where
                its rotary frequencies change with the length (longrope, dynamic), what is just below that length.
            keep_tokens: how many of the first tokens are never dropped, such as BOS and a system prompt.
            kv_bits: as in `SequenceCache`.
            allow_unverified: use a model that fails the self-test, with one warning.

        Raises:
            ConfigError: there is no room between what is kept and the window, or `kv_bits` is neither 8 nor 4.
            UnsupportedModelError: the model's keys cannot be moved; the layer is named.
        """
        super().__init__(model, kv_bits=kv_bits, allow_unverified=allow_unverified)
        longest = self._most_tokens or getattr(text_config(model), "max_position_embeddings", None)
        self.window_tokens = int((longest if window_tokens is None else window_tokens) or 0)
        self.keep_tokens, self.shifts = keep_tokens, 0
        if self._most_tokens is not None and self.window_tokens > self._most_tokens:
            raise ConfigError(
                f"window_tokens is {self.window_tokens}, but {self._most_tokens} at most is expected: the rotary "
                f"frequencies of {type(model).__name__} change with the length, and keys of both kinds cannot stand "
                "beside each other. Give a smaller window_tokens, or none."
            )
        if not 0 <= keep_tokens < self.window_tokens - 1:
            raise ConfigError(
                f"keep_tokens is {keep_tokens} and window_tokens {self.window_tokens}, but at least two tokens must "
                "fit behind those that are kept. Give a larger window_tokens."
            )

    def reset(self) -> None:
        """Forget every sequence, and that anything was shifted."""
        super().reset()
        self.shifts = 0

    def make_room(self, tokens: int) -> None:
        """Drop at least half of what is not kept of each active sequence, if `tokens` new ones do not fit otherwise.

        Args:
            tokens: how many come.

        Raises:
            PromptError: they do not fit behind those that are kept.
        """
        for number in self.batch:
            self._make_room(number, tokens)

    def _make_room(self, number: int, tokens: int) -> None:
        held = self._table.next_position(number)
        over = held + tokens - self.window_tokens
        if over <= 0:
            return
        rest = held - self.keep_tokens
        if over > rest:
            raise PromptError(
                f"{tokens} new tokens do not fit a window of {self.window_tokens}, of which {self.keep_tokens} are "
                "kept. Pass prefill_chunk_size to generate(), or shorten the prompt."
            )
        dropped = max(over, rest // 2)
        self.remove(number, self.keep_tokens, self.keep_tokens + dropped)
        self.shift(number, self.keep_tokens + dropped, None, -dropped)
        self.shifts += 1
