# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of a blend cache whose attention is sparse: an indexer's keys beside K and V, one vector of each token."""

from collections.abc import Callable

import torch
from torch import Tensor

from .layers import BlendLayer


class IndexedLayer(BlendLayer):
    """Behaves as transformers' `DynamicIndexedLayer`; a layer that shares the choice of another has no such keys."""

    keeps_all = False  # a probe writes to layers of its own: the indexer's keys are written once only

    def __init__(self) -> None:
        super().__init__()
        self.indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None

    def open_indexer(self, tokens: int, keys: Tensor) -> Tensor:
        """Make place for the indexer's keys of new tokens.

        Shapes: keys `[batch, rows, width]` → `[batch, tokens, width]`.
        """
        return self._appended(keys.new_zeros(keys.shape[0], tokens, keys.shape[2]))[:, -tokens:]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append the indexer's keys of new tokens, `[batch, new, width]`.

        Shape: `[batch, tokens, width]`.
        """
        return self._appended(indexer_key_states)

    def _appended(self, keys: Tensor) -> Tensor:
        known = () if self.indexer_keys is None else (self.indexer_keys,)
        self.indexer_keys = torch.cat((*known, keys), dim=1)
        return self.indexer_keys

    @property
    def nbytes(self) -> int:
        """Bytes held, spare columns included."""
        return super().nbytes + (0 if self.indexer_keys is None else self.indexer_keys.nbytes)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens."""
        super().crop(tokens_to_remove)
        self._change(lambda keys: keys[:, : self.length])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.indexer_keys = self.indexer_position_ids = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        super().batch_repeat_interleave(repeats)
        self._change(lambda keys: keys.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`."""
        super().batch_select_indices(indices)
        self._change(lambda keys: keys.index_select(0, indices.to(keys.device)))

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what is kept, `[batch, tokens, width]`."""
        if self.indexer_keys is not None:
            self.indexer_keys = change(self.indexer_keys)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = change(self.indexer_position_ids.permute(1, 2, 0)).permute(2, 0, 1)
