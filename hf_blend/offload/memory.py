# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The K and V of one cache that do not fit its device: where each layer is, and what is read ahead.

A layer is *resident* if its K and V stay on the device that computes it, and *away* otherwise. A layer that is away is
brought to the device for its own attention; meanwhile another thread reads the next one.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..cache.layers import Pair
from ..config import BlendConfig
from ..errors import ConfigError
from .states import AwayLayer, check_folder, is_same

DISK = "disk"
GROW_TOKENS = 64  # buffers grow by so many; so many new tokens of a layer stay on its device before they are put away
READER = "hf_blend-kv"  # the name of the thread that reads ahead
Device = int | str  # as accelerate names it: a number for a GPU, "mps", "cpu" or "disk"


class KVMemory:
    """Places the layers of one cache, and stores those that are away."""

    def __init__(self, layers: Sequence[int], config: BlendConfig) -> None:
        check_folder(config.offload_folder)
        self._layers = tuple(layers)
        self._config = config
        placed = config.device_map
        self.device_map: dict[int, Device] = {}
        if isinstance(placed, dict):
            self.device_map = dict(placed)
        else:
            self.device_map = dict.fromkeys(layers, placed)
        self._check_device_map()
        self.away: dict[int, AwayLayer] = {}  # by the number of the layer
        # Reading ahead: layer, rows, K and V
        self._ahead: tuple[int, int, Future[Pair]] | None = None
        self._reader = ThreadPoolExecutor(1, READER)
        weakref.finalize(self, _end, self._reader)
        self.loads = 0
        self.prefetched = 0

    def _check_device_map(self) -> None:
        for index, device in self.device_map.items():
            if index not in self._layers:
                raise ConfigError(
                    f"kv_device_map places layer {index}, but expected layers whose K and V grow with the context: "
                    f"{list(self._layers)}. Take it out: a layer with a window or a state stays where it is computed."
                )
            _torch_device(device)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return sum(layer.disk_bytes for layer in self.away.values())

    def is_resident(self, index: int, states: Tensor) -> bool:
        """Whether K and V of a layer, of which `states` are some, stay on its device."""
        device = self.device_map.get(index)
        return device is None or (device != DISK and is_same(_torch_device(device), states.device))

    def put(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Append tokens to a layer that is away, `[new, batch, kv_heads, head_dim]` each."""
        self._forget_ahead(index)
        if index not in self.away:
            placed = self.device_map.get(index)
            device = keys.device
            if placed is not None:
                device = None if placed == DISK else _torch_device(placed)
            self.away[index] = AwayLayer(keys, values, device, self._config.offload_folder)
        self.away[index].append(keys, values)

    def change(self, index: int, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to the batch of a layer that is away."""
        if index in self.away:
            self._forget_ahead(index)
            self.away[index] = self.away[index].changed(change)

    def crop(self, index: int, tokens: int) -> None:
        """Keep only the first tokens of a layer that is away."""
        if index in self.away:
            self.away[index].crop(tokens)
            if not tokens:
                del self.away[index]

    def remove(self, index: int) -> None:
        """Delete what is away of a layer."""
        self._forget_ahead(index)
        self.away.pop(index, None)

    def bring(self, index: int, tokens: int, keys: Tensor, values: Tensor) -> Pair:
        """Copy K and V of a layer to its device, with room for so many tokens; the caller owns the copy.

        Shapes: keys `[batch, kv_heads, rows, head_dim]` → `[rows, batch, kv_heads, head_dim]`.
        """
        layer = self.away.get(index)
        if layer is None or not layer.tokens:
            brought = _empty_rows(keys, round_up(tokens)), _empty_rows(values, round_up(tokens))
        else:
            ahead = self._take_ahead(index, tokens)
            brought = ahead or layer.bring(max(tokens, layer.tokens + GROW_TOKENS))
            self.loads += 1
            self.prefetched += ahead is not None
        self._read_ahead(index)
        return brought

    def _take_ahead(self, index: int, tokens: int) -> Pair | None:
        """What was read ahead, if it is of this layer."""
        if self._ahead is None or self._ahead[0] != index or self._ahead[1] < tokens:
            self._forget_ahead()
            return None
        brought = self._ahead[2].result()
        for states in brought:
            if states.is_cuda:
                states.record_stream(torch.cuda.current_stream(states.device))
        self._ahead = None
        return brought

    def _read_ahead(self, index: int) -> None:
        """Begin to read the next layer that is away; after the last one, the first."""
        order = [layer for layer in self._layers if layer in self.away]
        if self._ahead is not None or not order:
            return
        following = next((layer for layer in order if layer > index), order[0])
        if following == index:
            return
        layer = self.away[following]
        rows = layer.tokens + GROW_TOKENS
        self._ahead = following, rows, self._reader.submit(_on_side_stream, layer, rows)

    def _forget_ahead(self, index: int | None = None) -> None:
        """Drop what was read ahead of a layer, or of any layer (None)."""
        if self._ahead is not None and index in (None, self._ahead[0]):
            self._ahead[2].exception()  # waits for the reader
            self._ahead = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVMemory":
        """A copy with the same tokens in the same places."""
        twin = memo[id(self)] = KVMemory(self._layers, self._config)
        twin.away = {index: layer.changed(Tensor.clone) for index, layer in self.away.items()}
        return twin


def round_up(tokens: int) -> int:
    """Tokens of a buffer that has room for so many: the next multiple of `GROW_TOKENS`."""
    return -(-tokens // GROW_TOKENS) * GROW_TOKENS


def _empty_rows(states: Tensor, rows: int) -> Tensor:
    """`[batch, kv_heads, any, head_dim]` → `[rows, batch, kv_heads, head_dim]`."""
    return states.new_empty((rows, *states.shape[:2], states.shape[3]))


def _on_side_stream(layer: AwayLayer, rows: int) -> Pair:
    """Bring a layer on a CUDA stream of its own, beside what its device computes."""
    device = layer.like[0].device
    if device.type != "cuda":
        return layer.bring(rows)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        brought = layer.bring(rows)
    stream.synchronize()  # on the reader's thread
    return brought


def _end(reader: ThreadPoolExecutor) -> None:
    """Stop reading ahead, and wait for what is under way; the cache may be collected on the reader's thread."""
    is_reader = threading.current_thread().name.startswith(READER)
    reader.shutdown(wait=not is_reader, cancel_futures=True)


def _torch_device(device: Device) -> torch.device:
    try:
        if isinstance(device, int):
            return torch.device("cuda", device)
        return torch.device("meta" if device == DISK else device)
    except RuntimeError as error:
        raise ConfigError(
            f"kv_device_map has the device {device!r}, expected the number of a GPU, a device such as 'cpu', or "
            "'disk'. Correct it."
        ) from error
