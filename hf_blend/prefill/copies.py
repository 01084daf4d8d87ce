# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored states brought to a device ahead of their use, while the layer before them computes.

    ahead(layer i + 1)   a thread joins the chunks in pinned memory, and queues one copy on a stream of its own
    layer i              is queued and runs meanwhile
    take(layer i + 1)    the stream that computes waits for the copy; the host waits for the thread only

What is not brought ahead, because it is on the device, damaged or late, is copied where it is used, as on a CPU.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Parts = Callable[[], Sequence[Tensor]]  # gives `[layers, heads, tokens, width]` of each chunk
Moved = tuple[Tensor, Any, Sequence[Tensor]]  # what was moved, the event behind it, the parts in order
CopyKey = tuple[int, int, int]  # first layer, the one behind the last, K (0) or V (1)


class CopyStream:
    """A CUDA stream beside the one that computes, and the thread that feeds it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._thread = ThreadPoolExecutor(1, "hf_blend-copy")

    def submit(self, key: CopyKey, work: Callable[[], Any]) -> "Future[Any]":
        """Bring something on the thread, one after the other."""
        return self._thread.submit(work)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned host memory; freed when the copies from it are done."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def send(self, host: Tensor) -> tuple[Tensor, Any]:
        """Queue a copy; gives the tensor on the device, and the event behind the copy."""
        with torch.cuda.stream(self._stream):
            moved = host.to(self._device, non_blocking=True)
            return moved, self._stream.record_event()

    def join(self, moved: Tensor, event: Any) -> None:
        """Let the stream that computes wait for a copy, and keep its memory until what is queued there is done."""
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        moved.record_stream(computing)

    def close(self) -> None:
        """End the thread; the copy that it is making ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def open_stream(device: torch.device) -> CopyStream | None:
    """A stream of copies to a device; None where there is nothing to copy, or no stream to do it on."""
    return CopyStream(device) if device.type == "cuda" else None


class Copies:
    """The states that one forward brings ahead.

    Attributes:
        keeps_used: what was used stays on the device, for a pass over the same layers that follows.
    """

    def __init__(self) -> None:
        self.keeps_used = False
        self._streams: dict[torch.device, CopyStream | None] = {}
        self._pending: dict[tuple[CopyKey, torch.device], Future[Moved | None]] = {}
        self._there: dict[tuple[CopyKey, torch.device], Tensor | None] = {}

    def ahead(self, key: CopyKey, device: torch.device, parts: Parts) -> None:
        """Begin to copy states to a device, unless that has begun; copies for layers before these are dropped."""
        if device not in self._streams:
            self._streams[device] = open_stream(device)
        stream = self._streams[device]
        if stream is None or (key, device) in self._pending or (key, device) in self._there:
            return
        for copies in () if self.keeps_used else (self._pending, self._there):
            for old in [earlier for earlier in copies if earlier[0][1] < key[0]]:
                del copies[old]
        self._pending[key, device] = stream.submit(key, lambda: _bring(stream, parts))

    def take(self, key: CopyKey, device: torch.device) -> Tensor | None:
        """The states that were copied: all chunks side by side, `[layers, heads, tokens, width]`, or None."""
        copy_key = (key, device)
        if copy_key in self._pending:
            copy, stream = self._pending.pop(copy_key).result(), self._streams[device]
            self._there[copy_key] = None
            if copy is not None and stream is not None:
                moved, event, parts = copy
                stream.join(moved, event)
                self._there[copy_key] = _in_order(moved, parts)
        return self._there.get(copy_key)

    def close(self) -> None:
        """Let go of everything."""
        for stream in self._streams.values():
            if stream is not None:
                stream.close()
        self._streams, self._pending, self._there = {}, {}, {}


def _bring(stream: CopyStream, parts: Parts) -> Moved | None:
    try:
        states = parts()
        here = [state for state in states if state.device.type == "cpu"]
        if not here:
            return None
        shape = (*here[0].shape[:2], sum(state.shape[2] for state in here), here[0].shape[3])
        host = stream.pinned(shape, here[0].dtype)
        with torch.no_grad():
            torch.cat(here, dim=2, out=host)
        return (*stream.send(host), states)
    except (RuntimeError, MemoryError, OSError) as error:  # they are copied where they are used, then
        logger.debug("states were not brought ahead: %s", error)
        return None


def _in_order(moved: Tensor, states: Sequence[Tensor]) -> Tensor:
    """All chunks side by side: those that were copied, and those that were on the device before."""
    if all(state.device.type == "cpu" for state in states):
        return moved
    sizes = [state.shape[2] for state in states if state.device.type == "cpu"]
    moved_parts = iter(moved.split(sizes, dim=2))
    return torch.cat([next(moved_parts) if state.device.type == "cpu" else state for state in states], dim=2)
