# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The mask of the rows that flow, for every layer and for the attention that the model uses.

For eager it is an additive mask, for sdpa a `RowMask`, attended by blocks, for flex the model's own block mask, asked
at the rows' places. Flash attention has no mask that could say where scattered rows stand, and takes their positions
for those of packed sequences: layers with scattered rows go through sdpa, and whoever runs them is told so once.
"""

import logging
from collections.abc import Sequence
from typing import Any

from ..errors import UnsupportedModelError
from ..model.anatomy import LayerCall, LayerInfo
from ..model.attention import STOCK, is_flash, open_door
from ..model.row_masks import RowMask, row_mask
from .rows import Rows

logger = logging.getLogger(__name__)

_told: set[str] = set()  # attention implementations that were spoken of


class RowMasks:
    """Makes each mask once, for each mask of the model and each set of rows."""

    def __init__(self, config: Any, layers: Sequence[Any], past: int, tokens: int) -> None:
        """Prepare for one forward of a model with this config."""
        self._implementation = config._attn_implementation or "eager"
        self._seen = [layers[index] for index in kv_sources(layers, getattr(config, "layer_types", None))]
        self._past, self._tokens, self._is_flash = past, tokens, is_flash(self._implementation)
        open_door(self._implementation)
        self._made: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def give(self, index: int, call: LayerCall, model_mask: Any, rows: Rows) -> None:
        """Put its rows' lines of the mask into a call."""
        window = getattr(self._seen[index], "sliding_window", None)  # says how many keys a row of a mask has
        key = (id(model_mask), id(rows), window)
        if key not in self._made:
            mask = self._lines(model_mask, rows, self._seen[index], window)
            self._made[key] = (mask, (model_mask, rows))  # kept alive, or the ids would be used again
        call.arguments[call.mask_name] = self._made[key][0]
        if self._is_flash and not LayerInfo.of(call.layer).attention:
            raise UnsupportedModelError(
                f"the attention of layer {index}, {type(call.layer).__name__}, was not found, so it cannot go through "
                f"sdpa instead of {self._implementation}. Load the model with attn_implementation='sdpa'."
            )

    def _lines(self, model_mask: Any, rows: Rows, layer: Any, window: int | None) -> Any:
        keys, offset = self._past + self._tokens, 0  # all, but of a window
        if window is not None:
            keys, offset = layer.sizes_behind(self._past, self._tokens)
        past, columns = self._past - offset, rows.columns
        if getattr(model_mask, "ndim", 0) == 4 and model_mask.shape[2] == columns.shape[1] < self._tokens:
            # Gemma 4 has cut it: behind its last K and V it goes on with the rows that are asked for
            return RowMask.of(model_mask) if self._implementation == STOCK else model_mask
        if self._is_flash and self._implementation not in _told:
            _told.add(self._implementation)
            logger.warning(
                "attention is %s, which cannot see scattered rows: in a prefill that reuses chunks the layers that "
                "compute only some rows use sdpa; all others, and decoding, use %s",
                self._implementation,
                self._implementation,
            )
        name, window = (STOCK, window) if self._is_flash else (self._implementation, None)
        return row_mask(model_mask, columns, past, keys, name, lambda: rows.numbers[0], window)


def kv_sources(layers: Sequence[Any], kinds: Sequence[str] | None) -> list[int]:
    """The layer whose K and V each layer looks at: its own, or the last before it of its kind that has any."""
    found, last = list[int](), dict[str, int]()
    for index, layer in enumerate(layers):
        kind = "" if kinds is None else kinds[index]
        if hasattr(layer, "sizes_behind"):
            last[kind] = index
        found.append(last.get(kind, index))
    return found
