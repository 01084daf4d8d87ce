# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Asking transformers for a mask while it decodes, where attention without one is slow.

Without a mask, the stock sdpa function leaves grouped key heads to torch's `enable_gqa`, which on a CPU takes 1.6
times as long over 16,000 keys as the same function with a mask, which repeats the heads and runs the fused kernel
(benchmarks/LOG-archive.md). transformers makes a mask for one token at a time only for a cache that says it can be
compiled.
"""

from typing import Any

from transformers import Cache

from ..model.anatomy import text_config


class MaskedDecode(Cache):
    """A cache for whose decoding steps transformers makes masks, on a CPU and with grouped heads."""

    model: Any

    @property
    def is_expecting(self) -> bool:
        """Whether the next forward is known to bring stored chunks."""
        raise NotImplementedError

    @property
    def is_compileable(self) -> bool:
        """True with static buffers; otherwise only while decoding on a CPU, where transformers compiles nothing."""
        if super().is_compileable:
            return True
        if self.model.device.type != "cpu" or self.is_expecting or not self:
            return False
        config = text_config(self.model)
        if getattr(config, "attention_chunk_size", None) is not None:
            return False  # transformers 5.17 fails to make masks of chunks
        heads = getattr(config, "num_attention_heads", None)
        return heads != getattr(config, "num_key_value_heads", heads)
