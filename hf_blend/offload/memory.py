# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The K and V of one cache that does not fit its device: what is where, what is brought ahead, and how much is held.

A layer is *resident* where its K and V stay on the device that computes it, and *away* otherwise. A layer that is
away is brought for its own attention; meanwhile the next one is read on another thread.
"""

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .placement import DISK, Place, Shapes, memory_budget, place_layers
from .states import AwayLayer, States

GROW_TOKENS = 64  # buffers grow by so many; so many new tokens of a layer stay on its device before they are put away
READER = "hf_blend-kv"  # the name of the thread that reads ahead


class KVMemory:
    """Places the layers of one cache, holds those that are away, and counts bytes."""

    def __init__(
        self,
        layers: Sequence[int],
        device_map: str | Mapping[int, Place],
        max_memory: Mapping[Place, int | str] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        """Prepare to place some layers."""
        self._layers, self._settings = tuple(layers), (device_map, max_memory, folder)
        self._is_auto = device_map == "auto"
        self._budget = memory_budget(max_memory) if self._is_auto else {}
        self.device_map: dict[int, Place] = {}
        if not self._is_auto:
            self.device_map = dict.fromkeys(layers, device_map) if isinstance(device_map, str) else dict(device_map)
        self._check()
        self._states = States(folder)
        self._shapes: dict[int, Shapes] = {}  # of the layers that were seen, for `_room` tokens
        self._room = 0  # tokens that the present map is for
        self.away: dict[int, AwayLayer] = {}  # by the number of the layer
        self._counts: dict[Any, int] = {}
        # of the placed layers on the devices that compute them, and of a layer that was brought until the next one is
        self.resident_bytes = 0
        self._ahead: tuple[int, int, Future[tuple[Tensor, Tensor]]] | None = None
        self._reader: ThreadPoolExecutor | None = None
        self.peak_resident_bytes = self.loads = self.prefetched = 0

    def _check(self) -> None:
        for index, place in self.device_map.items():
            if index not in self._layers:
                raise ConfigError(
                    f"kv_device_map places layer {index}, but expected layers whose K and V grow with the context: "
                    f"{list(self._layers)}. Take it out: a layer with a window or a state stays where it is computed."
                )
            _device(place)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk."""
        return self._states.disk_bytes

    def count(self, what: Any, nbytes: int) -> None:
        """Note how many bytes of something are on a device."""
        self.resident_bytes += nbytes - self._counts.pop(what, 0)
        if nbytes:
            self._counts[what] = nbytes
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def is_resident(self, index: int, tokens: int, keys: Tensor, values: Tensor) -> bool:
        """Whether the K and V of a layer shall stay on its device once it holds so many tokens.

        Shapes: keys `[batch, kv_heads, rows, head_dim]`.
        """
        if self._is_auto:
            self._plan(index, round_up(tokens), keys, values)
        place = self.device_map.get(index)
        return place is None or (place != DISK and _is_same(_device(place), keys.device))

    def _plan(self, index: int, room: int, keys: Tensor, values: Tensor) -> None:
        """Place all layers for a number of tokens, if that was not done yet; unseen ones are taken to be alike."""
        seen = (_sized(keys, room), _sized(values, room), keys.dtype)
        if room <= self._room and _widths(self._shapes.get(index)) == _widths(seen):
            return
        room = max(room, self._room)
        self._room, self._shapes[index] = room, seen
        known = {one: self._shapes.get(one, seen) for one in self._layers}
        shapes = {one: ((room, *k[1:]), (room, *v[1:]), dtype) for one, (k, v, dtype) in known.items()}
        if not self._shapes.keys() >= shapes.keys():
            self._shapes = dict(shapes)
        self.device_map = place_layers(shapes, self._budget)
        main = keys.device.index if keys.device.type == "cuda" else keys.device.type
        away = sum(place != main for place in self.device_map.values())
        if away and main in self._budget:  # the last tokens of these stay on the device for a while
            recent = away * sum(GROW_TOKENS * _row_bytes(states) for states in (keys, values))
            self.device_map = place_layers(shapes, {**self._budget, main: max(0, self._budget[main] - recent)})

    def put(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Put tokens of a layer away, behind those that are.

        Shapes: keys `[new, batch, kv_heads, head_dim]`, values `[new, batch, kv_heads, head_dim]`.
        """
        self._forget_ahead(index)
        if index not in self.away:
            place = self.device_map[index]
            device = None if place == DISK else _device(place)
            self.away[index] = AwayLayer(index, self._states, keys, values, device)
        self.away[index].append(keys, values)

    def bring(self, index: int, tokens: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer on its device, in the caller's hands, with room for so many tokens.

        Shapes: keys `[batch, kv_heads, rows, head_dim]` → `[rows, batch, kv_heads, head_dim]`.
        """
        layer = self.away.get(index)
        self.count("at work", 0)
        if layer is None or not layer.tokens:
            rows = round_up(tokens)
            brought = tuple(states.new_empty(_sized(states, rows)) for states in (keys, values))
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
        """Have the next layer that is away read, the first after the last."""
        order = [one for one in self._layers if one in self.away and self.away[one].tokens]
        later = next((one for one in order if one > index), order[0] if order else index)
        if later == index or self._ahead is not None:
            return
        layer = self.away[later]
        rows = layer.tokens + GROW_TOKENS
        self._ahead = (later, rows, self.reading().submit(_on_side_stream, layer, rows))
        self.count("ahead", rows * layer.row_bytes)

    def reading(self) -> ThreadPoolExecutor:
        """The thread that reads ahead."""
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix=READER)
            weakref.finalize(self, _end, self._reader)
        return self._reader

    def release(self) -> None:
        """Drop what was read ahead and what was at work: no whole layer is used next."""
        self._forget_ahead()
        self.count("at work", 0)

    def _forget_ahead(self, index: int | None = None) -> None:
        """Drop what was read ahead, of a layer that changes or of any."""
        if self._ahead is not None and index in (None, self._ahead[0]):
            self._ahead[2].exception()  # the reader is done with it
            self._ahead = None
            self.count("ahead", 0)

    def crop(self, index: int, tokens: int) -> None:
        """Keep the first so many tokens of what is away of a layer."""
        if index in self.away:
            self._forget_ahead(index)
            self.away[index].crop(tokens)

    def remove(self, index: int) -> None:
        """Forget all that is away of a layer, and what was decided with it."""
        self._forget_ahead(index)
        if index in self.away:
            self.away.pop(index).remove()
        for what in ("at work", ("held", index)):
            self.count(what, 0)
        if not self.away and self._is_auto:
            self._room = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "KVMemory":
        """An empty one with the same settings and a folder of its own."""
        device_map, max_memory, folder = self._settings
        twin = memo[id(self)] = KVMemory(self._layers, device_map, max_memory, folder)
        return twin


def round_up(tokens: int) -> int:
    """The next larger size of a buffer."""
    return -(-tokens // GROW_TOKENS) * GROW_TOKENS


def _end(reader: ThreadPoolExecutor) -> None:
    """Let a reader finish, so that nothing is read from files that are about to be deleted."""
    reader.shutdown(wait=not threading.current_thread().name.startswith(READER))


def _on_side_stream(layer: AwayLayer, rows: int) -> tuple[Tensor, Tensor]:
    """Bring a layer without waiting for what its device computes."""
    device = layer.like[0].device
    if device.type != "cuda":
        return layer.bring(rows)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        brought = layer.bring(rows)
    stream.synchronize()  # on the reader's thread
    return brought


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


def _is_same(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index or 0) == (other.index or 0)


def _sized(states: Tensor, rows: int) -> tuple[int, ...]:
    return (rows, *states.shape[:2], states.shape[3])


def _widths(shapes: Shapes | None) -> Any:
    return None if shapes is None else (shapes[0][1:], shapes[1][1:], shapes[2])


def _row_bytes(states: Tensor) -> int:
    return states.shape[0] * states.shape[1] * states.shape[3] * states.element_size()
