# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What generation does to the rows of a cache, and what is noted of it."""

from torch import Tensor
from transformers.cache_utils import Cache

from .cache_layers import KVLayers
from .turns import KnownPrompts


class BatchRows(Cache):
    """Rows keep what is known of their own prompts, and are not healed any more: their answers are not known."""

    kv: KVLayers
    prompts: KnownPrompts

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the past of the beam that it continues; `beam_idx` is `[batch]`."""
        self.prompts.select_rows(beam_idx, self.batch_size)
        super().reorder_cache(beam_idx)
        self.kv.frontier.rows_changed()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`, or a boolean for each."""
        self.prompts.select_rows(indices, self.batch_size)
        super().batch_select_indices(indices)
        self.kv.frontier.rows_changed()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        super().batch_repeat_interleave(repeats)
        self.kv.frontier.rows_changed()
