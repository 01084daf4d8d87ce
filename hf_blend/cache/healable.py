# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What healing refuses, by name: before anything is written, or before a block is."""

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..errors import ConfigError, PromptError
from ..model.anatomy import refuse_extended
from ..prefill.blend import MISMATCH_LIMIT
from ..rotary.regime import frequency_regime


class Obstacle(Enum):
    """What came to the tokens of a cache that no full prefill of their ids has."""

    PADDING = (
        "hold padding, or may: a batch came in a forward whose mask was not seen. Tokens without gaps are expected. "
        "Pass prompts of equal length, or each prompt in a cache of its own."
    )
    ROWS = (
        "are no longer those of the prompts: rows were selected, repeated or put in another order, as beam search "
        "does. Heal before that, or take one answer to each prompt without beams."
    )
    EXTENDED = (
        "have seen self_extend, which attends at grouped positions, but the model's own positions are expected. "
        "reset() the cache and prefill outside of self_extend."
    )


def refuse(cache: Any) -> None:
    """Refuse a cache that cannot be made exact."""
    length, config = Cache.get_seq_length(cache), cache.traits.config
    refuse_extended(cache.model)
    for obstacle in cache.kv.frontier.obstacles:
        raise ConfigError(f"heal() was asked of a cache whose {length} columns {obstacle.value}")
    if frequency_regime(config, 1) != frequency_regime(config, length):
        raise ConfigError(
            f"heal() was asked of a cache of {length} tokens, a length at which {config.model_type} has other rotary "
            "frequencies than in a block (longrope, dynamic), but those of the whole are expected. Heal only what is "
            "within the trained length."
        )
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "visible", None) is not None:
            raise ConfigError(
                f"heal() was asked of a cache of {length} tokens, but layer {index} loaded only a part of their K and "
                "V. Open the store without partial."
            )
        if not getattr(layer, "is_healable", True):
            raise ConfigError(
                f"heal() was asked of a cache whose layer {index} is a {type(layer).__name__}, but K and V can be "
                "written in the place of others only where they are on the model's device, in whole groups. Leave "
                "kv_device_map out; with kv_bits do not crop before all is healed."
            )


def refuse_other_rows(cache: Any, ids: Tensor) -> None:
    """Refuse the ids of another batch, `[batch, columns]`."""
    if len(ids) != cache.batch_size:
        raise PromptError(
            f"{len(ids)} rows of token ids are known to heal a cache of {cache.batch_size} requests. Pass what "
            "generate returned: heal(history=output)."
        )


def refuse_other_tokens(own: Any, start: int, keys: Tensor, values: Tensor) -> None:
    """Refuse a block whose K or V at layer 0 are not those that this layer holds from column `start` on.

    There they depend on the token and its position alone, so blended ones are right but for rounding: PromptError says
    that other ids came. What a window has forgotten is not compared. Shapes: `[batch, kv_heads, rows, head_dim]` each.
    """
    own_keys, own_values = own.keys, own.values  # may be unpacked at each look
    oldest = own.length - own_keys.shape[2]
    first, stop = max(start, oldest), min(start + keys.shape[2], own.length)
    if stop <= first:
        return
    limit = MISMATCH_LIMIT * (2 if hasattr(own, "packed_tokens") else 1)  # packed here, and in the store before
    errors = list[Tensor]()
    for new, own_states in ((keys, own_keys), (values, own_values)):
        new = new[:, :, first - start : stop - start].float()
        size = torch.linalg.vector_norm(new, dim=(1, 3))
        error = torch.linalg.vector_norm(new - own_states[:, :, first - oldest : stop - oldest].float(), dim=(1, 3))
        errors.append(error / size.maximum(size.mean()).clamp_min(1e-30))
    row, column = divmod(int(torch.stack(errors).amax(0).argmax()), stop - first)
    if not (error := float(max(share[row, column] for share in errors))) <= limit:
        raise PromptError(
            f"the ids that came to heal a cache of {own.length} tokens are not those of its tokens: at column "
            f"{first + column} of row {row} K and V of layer 0 are off by {error:.2g}, where {limit:.1g} is allowed. "
            "Pass what generate returned with this cache."
        )
