# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The K and V of one cache that do not fit its device: where each layer is, what is read ahead, and byte counts.

A layer is *resident* if its K and V stay on the device that computes it, and *away* otherwise. A layer that is away is
brought to the device for its own attention; meanwhile another thread reads the next one.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_max_memory
from torch import Tensor, nn

from ..cache.quantised_layer import GROUP_TOKENS, pack
from ..config import BlendConfig
from ..errors import ConfigError
from .states import AwayLayer, States, as_states, is_same

DISK = "disk"
GROW_TOKENS = 64  # buffers grow by so many; so many new tokens of a layer stay on its device before they are put away
READER = "hf_blend-kv"  # the name of the thread that reads ahead
Place = int | str  # a device as accelerate names it: a number for a GPU, "mps", "cpu" or "disk"


class KVMemory:
    """Places the layers of one cache, stores those that are away, and counts bytes."""

    def __init__(self, layers: Sequence[int], config: BlendConfig) -> None:
        self._layers, self._config, self.bits, placed = tuple(layers), config, config.kv_bits, config.device_map
        self._is_auto = placed == "auto"
        self._budget = memory_budget(config.memory_limits) if self._is_auto else {}
        places: Any = dict.fromkeys(layers, placed) if isinstance(placed, str) else placed
        self.device_map: dict[int, Place] = {} if self._is_auto else places
        for index, place in self.device_map.items():
            if index not in self._layers:
                raise ConfigError(
                    f"kv_device_map places layer {index}, but expected layers whose K and V grow with the context: "
                    f"{list(self._layers)}. Take it out: a layer with a window or a state stays where it is computed."
                )
            _device(place)
        self._states = States(config.offload_folder)
        self._row_bytes: dict[int, tuple[int, int]] = {}  # of a token of each layer: as it is kept, as it is brought
        self._room = 0  # tokens that the present map is for
        self.away: dict[int, AwayLayer] = {}  # by the number of the layer
        self._counts: dict[Any, int] = {}
        # of the placed layers on the devices that compute them, and of a layer that was brought until the next one is
        self.resident_bytes = 0
        self._ahead: tuple[int, int, Future[tuple[Tensor, Tensor]]] | None = None
        self.reader = ThreadPoolExecutor(1, READER)
        weakref.finalize(self, _end, self.reader)  # nothing is read from files that are about to be deleted
        self.peak_resident_bytes = self.loads = self.prefetched = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return self._states.disk_bytes

    def count(self, what: Any, nbytes: int) -> None:
        """Set how many bytes of one kind are on a device; the counts of all kinds add up to `resident_bytes`."""
        self.resident_bytes += nbytes - self._counts.pop(what, 0)
        if nbytes:
            self._counts[what] = nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def is_resident(self, index: int, tokens: int, keys: Tensor, values: Tensor) -> bool:
        """Whether K and V of a layer, `[batch, kv_heads, any, head_dim]`, stay on its device with `tokens` tokens."""
        if self._is_auto:
            self._plan(index, round_up(tokens), keys, values)
        place = self.device_map.get(index)
        return self.bits is None and (place is None or (place != DISK and is_same(_device(place), keys.device)))

    def _plan(self, index: int, room: int, keys: Tensor, values: Tensor) -> None:
        """Place all layers for a number of tokens, unless it was done; layers not seen yet count as this one."""
        brought = sum(map(_row_bytes, (keys, values)))
        if room <= self._room and self._row_bytes.get(index, (0, 0))[1] == brought:
            return
        seen = brought if self.bits is None else _packed_bytes(self.bits, keys, values), brought
        self._room = room = max(room, self._room)
        self._row_bytes = {layer: self._row_bytes.get(layer, seen) for layer in self._layers} | {index: seen}
        nbytes = {layer: room * kept for layer, (kept, _) in self._row_bytes.items()}
        self.device_map = place_layers(nbytes, self._budget)
        main = keys.device.index if keys.device.type == "cuda" else keys.device.type
        away = sum(place != main for place in self.device_map.values()) if self.bits is None else len(nbytes)
        if away and main in self._budget:  # the last tokens of these stay on the device for a while, one is unpacked
            beside = away * GROW_TOKENS * brought + room * (seen[1] - seen[0])
            self.device_map = place_layers(nbytes, {**self._budget, main: max(0, self._budget[main] - beside)})

    def put(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Append tokens to a layer that is away, `[new, batch, kv_heads, head_dim]` each."""
        self._forget_ahead(index)
        if index not in self.away:
            place = self.device_map.get(index)
            device = keys.device if place is None else None if place == DISK else _device(place)
            self.away[index] = AwayLayer(index, self._states, (keys, values), device, self.bits)
        self.away[index].append(keys, values)

    def change(self, index: int, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change to the batch of a layer that is away."""
        if index in self.away:
            self._forget_ahead(index)
            self.away[index] = self.away[index].changed(self._states, change)

    def bring(self, index: int, tokens: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy K and V of a layer to its device, with room for so many tokens; the caller owns the copy.

        Shapes: keys `[batch, kv_heads, rows, head_dim]` → `[rows, batch, kv_heads, head_dim]`.
        """
        layer = self.away.get(index)
        self.count("at work", 0)
        if layer is None or not layer.tokens:
            rows = round_up(tokens)
            brought = tuple(states.new_empty((rows, *states.shape[:2], states.shape[3])) for states in (keys, values))
        else:
            brought = self._take_ahead(index, tokens) or layer.bring(max(tokens, layer.tokens + GROW_TOKENS))
            self.loads += 1
        self.count("at work", sum(states.nbytes for states in brought))
        self._read_ahead(index)
        return brought[0], brought[1]

    def _take_ahead(self, index: int, tokens: int) -> tuple[Tensor, Tensor] | None:
        if self._ahead is None or self._ahead[0] != index or self._ahead[1] < tokens:
            self._forget_ahead()
            return None
        brought = self._ahead[2].result()
        for states in brought:
            if states.is_cuda:
                states.record_stream(torch.cuda.current_stream(states.device))
        self._ahead = None
        self.count("ahead", 0)
        self.prefetched += 1
        return brought

    def _read_ahead(self, index: int) -> None:
        """Begin to read the next layer that is away; after the last one, the first."""
        order = [layer for layer in self._layers if layer in self.away and not self.away[layer].nbytes_here]
        later = next((layer for layer in order if layer > index), order[0] if order else index)
        if later == index or self._ahead is not None:
            return
        next_layer = self.away[later]
        rows = next_layer.tokens + GROW_TOKENS
        self._ahead = (later, rows, self.reader.submit(_on_side_stream, next_layer, rows))
        self.count("ahead", rows * sum(map(_row_bytes, map(as_states, next_layer.like))))

    def release(self) -> None:
        """Drop the layer that was read ahead; called where the next step uses blocks, not whole layers."""
        self._forget_ahead()
        self.count("at work", 0)

    def _forget_ahead(self, index: int | None = None) -> None:
        """Drop what was read ahead of a layer, or of any layer (None)."""
        if self._ahead is not None and index in (None, self._ahead[0]):
            self._ahead[2].exception()  # the reader is done with it
            self._ahead = None
            self.count("ahead", 0)

    def crop(self, index: int, tokens: int) -> None:
        """Keep only the first tokens of a layer that is away."""
        if index in self.away:
            self._forget_ahead(index)
            self.away[index].crop(tokens) if tokens else self.away.pop(index).remove()

    def remove(self, index: int) -> None:
        """Delete what is away of a layer and reset its counts; "auto" places layers anew when none is away."""
        self._forget_ahead(index)
        if index in self.away:
            self.away.pop(index).remove()
        for what in ("at work", ("held", index)):
            self.count(what, 0)
        if not self.away and self._is_auto:
            self._room = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVMemory":
        """A copy with the same tokens in the same places, and its own folder."""
        twin = memo[id(self)] = KVMemory(self._layers, self._config)
        twin.device_map, twin._room, twin._row_bytes = dict(self.device_map), self._room, dict(self._row_bytes)
        twin.away = {index: layer.changed(twin._states, Tensor.clone) for index, layer in self.away.items()}
        for what, nbytes in self._counts.items():
            twin.count(what, nbytes if what[0] == "held" else 0)
        return twin


def memory_budget(max_memory: Mapping[Place, int | str] | None) -> dict[Place, int]:
    """Bytes that may be used of each device, in the order in which accelerate fills them."""
    try:
        return dict(get_max_memory(None if max_memory is None else dict(max_memory)))
    except ValueError as error:
        raise ConfigError(
            f"max_memory is {dict(max_memory or {})!r}, which accelerate refuses: {error}. Expected bytes for each "
            'device, such as {0: "4GB", "cpu": "16GB"}.'
        ) from error


def place_layers(layers: Mapping[int, int], budget: Mapping[Place, int]) -> dict[int, Place]:
    """Let accelerate distribute the K and V of some layers, of so many bytes each, over devices, host memory and disk.

    accelerate fills the devices in order and leaves room on the first, and in host memory, for the largest layer that
    is not there: the one at work. What fits nowhere goes to the disk.
    """
    tree, memory = nn.Module(), dict[Any, Any](budget)
    for index, nbytes in layers.items():
        tree.register_buffer(str(index), torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    device_map = infer_auto_device_map(tree, memory, clean_result=False)
    places: dict[int, Place] = {int(name): place for name, place in device_map.items()}
    on_disk = sum(layers[index] for index, place in places.items() if place == DISK)
    if on_disk > budget.get(DISK, on_disk):
        raise ConfigError(
            f"the K and V of {sum(place == DISK for place in places.values())} of {len(places)} layers, {on_disk:,} "
            f"bytes, go to the disk, but max_memory allows {budget[DISK]:,} there. Raise max_memory, or shorten the "
            "prompt."
        )
    return places


def round_up(tokens: int) -> int:
    """Tokens of a buffer that has room for so many: the next multiple of `GROW_TOKENS`."""
    return -(-tokens // GROW_TOKENS) * GROW_TOKENS


def _on_side_stream(layer: AwayLayer, rows: int) -> tuple[Tensor, Tensor]:
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


def _device(place: Place) -> torch.device:
    try:
        if isinstance(place, int):
            return torch.device("cuda", place)
        return torch.device("meta" if place == DISK else place)
    except RuntimeError as error:
        raise ConfigError(
            f"kv_device_map has the device {place!r}, expected the number of a GPU, a device such as 'cpu', or "
            "'disk'. Correct it."
        ) from error


def _packed_bytes(bits: int, keys: Tensor, values: Tensor) -> int:
    """Bytes of a packed token of a layer, rounded up."""
    group = (
        states.new_empty((*states.shape[:2], GROUP_TOKENS, states.shape[3]), device="meta")
        for states in (keys, values)
    )
    return -(-sum(tensor.nbytes for tensor in pack(bits, *group).values()) // GROUP_TOKENS)


def _row_bytes(states: Tensor) -> int:
    return states.shape[0] * states.shape[1] * states.shape[3] * states.element_size()
