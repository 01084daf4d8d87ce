# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A layer of a blend cache whose attention is sparse: an indexer's keys beside K and V, one vector of each token."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..model.anatomy import LayerCall
from ..prefill.blend import LayerKind
from ..prefill.rows import Rows
from ..rotary.base import Table
from .layers import BlendLayer
from .quantised_layer import QuantisedLayer


class IndexedKind(LayerKind):
    """The indexer's keys of one layer in a prefill; where they are stored unrotated, the layer rotates all of them."""

    is_plain = False

    def __init__(self) -> None:
        self._table: Table | None = None  # of all tokens, past and new, where the layer needs it
        self._keys: Tensor | None = None  # of the new tokens, `[batch, tokens, width]`

    def enter(self, prefill: Any, index: int, call: LayerCall, table: Table | None) -> Table | None:
        """Return the new tokens' part of the table; a layer that rotates stored keys has those before them too."""
        self._table, beside = None, prefill.realigner.styles[index].beside
        if beside is not None:
            self.parts = frozenset({"keys", "indexer"})
        if table is None or beside is None or beside.turns:
            return table
        self._table = table
        return table[0][:, -prefill.width :], table[1][:, -prefill.width :]

    def take_rows(self, prefill: Any, call: LayerCall, rows: Rows) -> None:
        """Append the rows' part of the rotary table, for their queries, to that of all tokens, for the keys."""
        if self._table is not None:
            table = tuple(rows.behind(tensor, prefill.width) for tensor in self._table)
            call.arguments["position_embeddings"] = call.given["position_embeddings"] = table  # of this layer alone

    def update_indexer(self, prefill: Any, index: int, keys: Tensor, rows: Rows | None) -> Tensor:
        """Write the rows' keys, `[batch, rows, width]`, among those that are stored; gives those of all tokens."""
        layer = prefill.layers[index]
        if self._keys is None:
            self._keys = layer.open_indexer(prefill.width, keys)
            prefill.realigner.write_beside(index, prefill.stored_chunks(), self._keys[:, None])
        if rows is None:
            self._keys.copy_(keys)
        else:
            rows.write_states([self._keys[:, None]], [keys[:, None]])
        all_keys: Tensor = layer.indexer_keys
        return all_keys

    def leave(self) -> None:
        """Forget the new tokens."""
        self._table = self._keys = None


class IndexedLayer(BlendLayer):
    """Behaves as transformers' `DynamicIndexedLayer`; a layer that shares the choice of another has no such keys."""

    prefill_kind = IndexedKind
    keeps_all = False  # the indexer's keys are written once only, and a probe would write them again

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.indexer_keys: Tensor | None = None
        self.indexer_position_ids: Tensor | None = None

    def suspend(self, snapshot: Any, past: int) -> Any:
        """Drop the positions behind `past`, as the model appends them again; returns those before the drop."""
        position_ids = self.indexer_position_ids
        self.indexer_position_ids = None if position_ids is None else position_ids[..., :past]
        return position_ids

    def resume(self, suspended: Any) -> None:
        """Restore the positions that `suspend` returned."""
        self.indexer_position_ids = suspended

    def open_indexer(self, tokens: int, keys: Tensor) -> Tensor:
        """Return columns for the indexer's keys of new tokens, `[batch, tokens, width]`; `keys` are of some rows."""
        return self.update_indexer(keys.new_zeros(keys.shape[0], tokens, keys.shape[2]))[:, -tokens:]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append the indexer's keys of new tokens, `[batch, new, width]`; gives those of all tokens."""
        cached = () if self.indexer_keys is None else (self.indexer_keys,)
        self.indexer_keys = torch.cat((*cached, indexer_key_states), dim=1)
        return self.indexer_keys

    def state(self) -> dict[str, Tensor]:
        """See `BlendLayer.state`; the tokens are on the second axis also of the indexer's tensors."""
        state = super().state()
        if self.indexer_keys is not None:
            state["indexer.keys"] = self.indexer_keys
        if self.indexer_position_ids is not None:
            state["indexer.position_ids"] = self.indexer_position_ids.movedim(-1, 1)
        return state

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """See `BlendLayer.load_state`."""
        attention = {name: tensor for name, tensor in state.items() if not name.startswith("indexer.")}
        super().load_state(attention, tokens)
        self.indexer_keys = state.get("indexer.keys")
        if "indexer.position_ids" in state:
            self.indexer_position_ids = state["indexer.position_ids"].movedim(1, -1)

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """See `BlendLayer.has_lengths`."""
        attention = {}
        for name, tensor in state.items():
            if not name.startswith("indexer."):
                attention[name] = tensor
            elif tensor.shape[1] != tokens:
                return False
        return super().has_lengths(attention, tokens)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, spare columns included."""
        return super().nbytes + (0 if self.indexer_keys is None else self.indexer_keys.nbytes)

    def _shortened(self) -> None:
        super()._shortened()
        self._change(lambda keys: keys[:, : self.length])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.indexer_keys = self.indexer_position_ids = None

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map(change)
        self._change(change)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change what is kept, `[batch, tokens, width]`."""
        if self.indexer_keys is not None:
            self.indexer_keys = change(self.indexer_keys)
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = change(self.indexer_position_ids.permute(1, 2, 0)).permute(2, 0, 1)


class QuantisedIndexedLayer(IndexedLayer, QuantisedLayer):
    """K and V in 8 or 4 bits, and an indexer's keys as they are."""
