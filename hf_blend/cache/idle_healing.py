# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing in a thread of its own, while a person reads the answer or types.

healing = IdleHealing()
output = model.generate(**inputs, past_key_values=cache)
healing.start(cache, output)
question = input()
healing.stop()                      # within one block; then the cache is this thread's again
"""

import atexit
import logging
import time
from threading import Event
from typing import Any

from torch import Tensor

from .. import threads
from .blend_cache import BlendCache
from .healing import BLOCK_TOKENS

logger = logging.getLogger(__name__)

STEP_TOKENS, STEP_SECONDS = 64, 0.5  # of the first call, and what one may take: `stop` waits for no more
FEWEST_TOKENS = 32  # of a call: a group of 8 or 4 bits


class IdleHealing:
    """Heals one cache at a time; between `start` and `stop` nothing else may use the cache, its model may be used."""

    def __init__(self) -> None:
        self._future: threads.Started[None] | None = None
        self._is_stopped = Event()

    def start(self, cache: BlendCache, history: Tensor | None = None) -> None:
        """Begin to heal, with what `generate` returned, `[batch, tokens]`; a cache that is healed before is left."""
        self.stop()
        self._is_stopped = is_stopped = Event()
        self._future = threads.start(lambda: _heal(cache, history, is_stopped), "hf_blend-heal")
        atexit.register(self.stop)  # a process that ends while one of its threads is inside torch aborts

    def stop(self) -> None:
        """Wait until the block under way is done. A failure is logged: the cache stays blended from there on."""
        atexit.unregister(self.stop)
        future, self._future = self._future, None
        self._is_stopped.set()
        if future is not None:
            future.thread.join()
            future.result()


def _heal(cache: BlendCache, history: Tensor | None, is_stopped: Event) -> None:
    before: Any = None
    tokens, began_s = STEP_TOKENS, time.monotonic()
    try:
        while not is_stopped.is_set() and (left := cache.heal(tokens, history)) and left != before:
            fitting = tokens * STEP_SECONDS / max(time.monotonic() - began_s, 1e-9)
            before, tokens, began_s = left, min(max(int(fitting), FEWEST_TOKENS), BLOCK_TOKENS), time.monotonic()
    except Exception as error:
        logger.warning("healing ended (%r), and the cache stays exact on the left and blended on the right", error)
