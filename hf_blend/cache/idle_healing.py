# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Healing in a second thread, while a person reads the answer or types.

healing = IdleHealing()
output = model.generate(**inputs, past_key_values=cache)
healing.start(cache)
question = input()
healing.stop()                      # waits for one step; then the cache is this thread's again
"""

import logging
import threading
from threading import Event, Thread

from .blend_cache import BlendCache

logger = logging.getLogger(__name__)

STEP_TOKENS = 64  # `stop` waits for no more


class IdleHealing:
    """Heals one cache at a time; between `start` and `stop` nothing else may use the cache, its model may be used."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._is_stopped = Event()

    def start(self, cache: BlendCache) -> None:
        """Begin to heal a cache; the one before it is healed no further."""
        self.stop()
        self._is_stopped = Event()
        self._thread = Thread(target=_heal, args=(cache, self._is_stopped), name="hf_blend-heal")
        self._thread.start()

    def stop(self) -> None:
        """Wait until the step under way is done. A failure is logged: the cache stays blended from there on."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _heal(cache: BlendCache, is_stopped: Event) -> None:
    before = None
    try:
        # A process that ends waits for this thread: inside torch it would abort.
        while not is_stopped.is_set() and threading.main_thread().is_alive():
            left = cache.heal(STEP_TOKENS)
            if not left or left == before:
                return
            before = left
    except Exception as error:
        logger.warning("healing ended (%r): the cache stays as far blended as it was", error)
