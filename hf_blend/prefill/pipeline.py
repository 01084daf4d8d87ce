# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The pipeline of CacheBlend (section 5): while a layer computes, the KV of the next ones is loaded.

A thread of the request reads and verifies the layers of every chunk, one layer of all chunks after the other, without
waiting for their use: what was read is kept until the request ends anyway, and the first layers take longest to
compute. Who uses a layer waits for it in `StreamedLayers`. The thread ends with the request.
"""

import threading
from collections.abc import Sequence

from ..store.stream import StreamedLayers


class Pipeline:
    """Reads ahead for one request."""

    def __init__(self, streams: Sequence[StreamedLayers]) -> None:
        self._streams = list(streams)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="hf_blend-load", daemon=True)
        for stream in self._streams:
            stream.reader = self._thread
        self._thread.start()

    def close(self, wait_s: float = 5.0) -> None:
        """End the thread; one that hangs in a read is left to end by itself."""
        self._is_stopped = True
        if self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        for stream in self._streams:
            stream.reader = None

    def _run(self) -> None:
        for layer in range(max(map(len, self._streams), default=0)):
            for stream in self._streams:
                if self._is_stopped:
                    return
                if layer < len(stream):
                    stream.fetch_kv(layer)
