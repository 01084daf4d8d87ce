# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing: blended K and V become those of a full prefill, between two turns.

The stock model prefills the cached tokens again, in blocks, into a second cache. Where every layer keeps all tokens as
they came, the second cache begins with the exact columns of the first, and each block is copied over as soon as it is
computed: the cache is exact on the left and blended on the right. A column of a window, of a mixer's state, of an
indexer or of packed groups cannot be exchanged alone: there the second cache begins with the first token, and its
layers replace the blended ones when it has as many tokens.

Until it is done, K and V are in memory twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..errors import ConfigError
from ..model.anatomy import cache_argument, cache_class_for, canonical, decoder_of, input_device, refuse_extended
from ..model.identity import author_of, refuse_autocast, refuse_other_author
from ..store.memory import available_bytes
from .chains import store_links
from .layers import BlendLayer
from .state import ASK_AGAIN, BlendState, KVLayers

BLOCK_TOKENS = 256  # in one forward


class Healing:
    """A second cache, filled by the stock model.

    Attributes:
        reached: how many tokens are in it.
        copies_blocks: each block is copied to the first cache as soon as it is computed.
    """

    def __init__(self, state: BlendState) -> None:
        """Begin with the exact columns of a cache, or with none."""
        self.copies_blocks = copies_blocks(state.kv)
        self.reached = (state.inexact_from or 0) if self.copies_blocks else 0
        self.kv = KVLayers.empty(state.model, len(state.kv.all), state.config)
        for layer, held in zip(self.kv.of_tokens, state.kv.of_tokens, strict=True):
            if self.reached and held.length:
                layer.update(held.keys[:, :, : self.reached], held.values[:, :, : self.reached])
            if getattr(held, "record_past", False):
                layer.record_past = True

    def compute(self, state: BlendState, ids: Tensor) -> None:
        """Run a block of ids, `[batch, tokens]`, through the model; after a failure all is as it was before it."""
        model, start, stop = state.model, self.reached, self.reached + ids.shape[1]
        device, decoder = input_device(model), decoder_of(model)
        cache = cache_class_for(Cache, model)(layers=self.kv.all)
        positions = torch.arange(start, stop, device=device)[None].expand(len(ids), -1)
        snapshots = [layer.snapshot() for layer in self.kv.of_tokens]
        try:
            with canonical(model):
                decoder(
                    input_ids=ids.to(device), position_ids=positions, use_cache=True, **cache_argument(decoder, cache)
                )
                if any(module.training for module in decoder.modules()):
                    raise ConfigError(
                        f"tokens {start} to {stop} were healed while {type(model).__name__} was set to training mode, "
                        "in which it may drop out, but evaluation mode is expected. Heal again."
                    )
                refuse_other_author(state.author, author_of(model), stop, "Heal again when it is what it was.")
        except BaseException:
            self.kv.restore(snapshots)
            raise
        self.reached = stop

    def finish(self, state: BlendState, start: int) -> None:
        """Copy the columns from `start` on to the first cache, or all layers once the last token is computed."""
        is_done = self.reached == state.kv.length
        if self.copies_blocks:
            with torch.inference_mode():  # the first cache may have been filled in it
                for held, layer in zip(state.kv.of_tokens, self.kv.of_tokens, strict=True):
                    if held.length:
                        held.overwrite(start, layer.keys[:, :, start:], layer.values[:, :, start:])
            state.inexact_from = self.reached
        elif is_done:
            for held, layer in zip(state.kv.of_tokens, self.kv.of_tokens, strict=True):
                held.adopt(layer)
        if is_done:
            state.inexact_from = state.healing = None


def copies_blocks(kv: KVLayers) -> bool:
    """Whether every layer keeps the columns of all tokens as they came."""
    return all(type(layer) is BlendLayer for layer in kv.of_tokens)


def tokens_left(state: BlendState) -> int:
    """How many tokens have to be computed until all of a cache are exact."""
    if state.inexact_from is None:
        return 0
    if state.healing is not None:
        return int(state.kv.length - state.healing.reached)
    return state.kv.length - (state.inexact_from if copies_blocks(state.kv) else 0)


@torch.inference_mode(False)  # the second cache may be continued in any mode
@torch.no_grad()  # views of another mode can be read
def heal(state: BlendState, tokens: int | None) -> int:
    """Compute further tokens of a cache, all if `tokens` is None; returns how many are left, see `tokens_left`.

    Tokens that came as embeddings, as an image, or unseen in compiled code have no known ids: these and all behind
    them stay as they are.
    """
    refuse_other_author(state.author, author_of(state.model), state.kv.length, ASK_AGAIN)  # none is exact for another
    if tokens == 0 or state.inexact_from is None:
        return tokens_left(state)
    _refuse(state)
    rows = state.tokens.rows(state.info.placeholders)
    known = min(state.kv.length, *map(len, rows))
    ids = torch.tensor([row[:known] for row in rows])
    if state.healing is None:
        state.healing = Healing(state)
    healing, before = state.healing, state.inexact_tokens()
    stop = known if tokens is None else min(known, healing.reached + tokens)
    while healing.reached < stop:
        start = healing.reached
        healing.compute(state, ids[:, start : min(start + BLOCK_TOKENS, stop)])
        healing.finish(state, start)
    if healing.copies_blocks and not state.report.refused_chunks:
        store_links(state, healing.reached)
    state.report.healed_tokens += before - state.inexact_tokens()
    return tokens_left(state)


def _refuse(state: BlendState) -> None:
    """Refuse a cache that cannot be made exact."""
    length, info = state.kv.length, state.info
    refuse_autocast(state.model, info.layers)
    refuse_extended(state.model)
    info.refuse_tokens(2, length)  # a block continues the states of the tokens before it
    if state.tokens.is_extended:
        raise ConfigError(
            f"heal() was asked of a cache whose {length} columns have seen self_extend, which attends at grouped "
            "positions, but the model's own positions are expected. reset() the cache and prefill outside of "
            "self_extend."
        )
    if state.tokens.is_padded():
        raise ConfigError(
            f"heal() was asked of a cache whose {length} columns hold padding, or may, but tokens without gaps are "
            "expected. Pass prompts of equal length, or each prompt in a cache of its own."
        )
    if not state.has_one_regime(1, length):
        raise ConfigError(
            f"heal() was asked of a cache of {length} tokens, and at this length, or at one that it had, "
            f"{info.config.model_type} has other rotary frequencies than in a block (longrope, dynamic), but those of "
            "the whole are expected. Heal only what was never longer than the trained length."
        )
    if state.kv.are_partial:
        raise ConfigError(
            f"heal() was asked of a cache of {length} tokens, but some layers loaded only a part of their K and V. "
            "Open the store without partial."
        )
    if state.kv.memory is not None:
        raise ConfigError(
            "heal() was asked of a cache with kv_device_map, but a second cache is expected beside it on the model's "
            "device. Leave kv_device_map out."
        )
    if state.healing is None:
        _refuse_without_memory(state.kv.of_tokens)


def _refuse_without_memory(layers: Sequence[object]) -> None:
    """Refuse where the K and V of layers have no room beside them."""
    needed: dict[torch.device, int] = {}
    for layer in layers:
        device = getattr(layer, "device", None)
        if device is not None:
            needed[device] = needed.get(device, 0) + getattr(layer, "nbytes", 0)
    for device, needed_bytes in needed.items():
        if needed_bytes > (left := _free_bytes(device)):
            raise ConfigError(
                f"heal() needs {needed_bytes:,} bytes on {device} for a second cache, but {left:,} are free. Free "
                "some, crop the cache, or leave it blended."
            )


def _free_bytes(device: torch.device) -> int:
    """What a device has left for tensors."""
    if device.type != "cuda":
        return available_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
