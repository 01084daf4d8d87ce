# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline of CacheBlend (section 5): while a layer computes, the KV of the next ones is loaded.

    fetch_kv(layer)      on a thread of this request: read and verify the layer of every chunk
    synchronize(layer)   the user of a layer announces it and waits for it (in `StreamedLayers`)
    prefill_layer        is the model's own layer, which runs meanwhile

The thread is at most `depth` layers ahead of what is used, and ends with the request.
"""

import threading
from collections.abc import Sequence

from ..store.stream import StreamedLayers

IDLE_S = 30.0  # a request that uses nothing for so long is gone; what is still needed is then read where it is used


class Pipeline:
    """Reads ahead for one request."""

    def __init__(self, streams: Sequence[StreamedLayers], depth: float) -> None:
        self._streams, self._depth = list(streams), depth
        self._reached, self._is_stopped = -1, False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hf_blend-load", daemon=True)
        for stream in self._streams:
            stream.drivers.append(self)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether layers are still read ahead."""
        return self._thread.is_alive() and not self._is_stopped

    def synchronize(self, layer: int) -> None:
        """A layer is used now: the ones behind it may be fetched."""
        with self._moved:
            self._reached = max(self._reached, layer)
            self._moved.notify_all()

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread; one that hangs in a read is left to end by itself."""
        with self._moved:
            self._is_stopped = True
            self._moved.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        for stream in self._streams:
            if self in stream.drivers:
                stream.drivers.remove(self)

    def _run(self) -> None:
        for layer in range(max(map(len, self._streams), default=0)):
            with self._moved:
                may = self._moved.wait_for(lambda: self._is_stopped or layer <= self._reached + self._depth, IDLE_S)  # noqa: B023
                if not may or self._is_stopped:
                    self._is_stopped = True
                    return
            for stream in self._streams:
                if layer < len(stream) and not self._is_stopped:
                    stream.fetch_kv(layer)
