# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Children that save sessions under adapters that alternate, until they are killed.

What they leave is loaded under every adapter: under the one that computed it, it is what stock computes; under each
other it is refused.
"""

import os
import signal
import time
from collections.abc import Callable
from random import Random

import torch

from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.context.session import load_session, save_session
from hf_blend.errors import ConfigError, StoreError
from tests.adapters import adapted, held_as_stock, off, switched, unchanged
from tests.asking import prompt
from tests.sequences import fed

from .fault import FaultClass, Verdict
from .kills import fork, read_numbers

MODELS = {"formal": unchanged, "casual": switched, "off": off}
SAVED = 100  # of one child at most
TOKENS = 12


class SavedSessions(FaultClass):
    """What one adapter computed and another may save; the child is killed meanwhile."""

    kill_share = 0.1

    def setup(self) -> None:
        """Let the model be tested as each of what it is, so that children need not."""
        self._model = adapted()
        self._path = self.folder / "session"
        self._saved: int | None = None  # the last that was acknowledged or seen
        for change in MODELS.values():
            with change(self._model):
                fed(SequenceCache(self._model), prompt(TOKENS))

    def inject(self, count: int) -> None:
        """Kill one child, however many are asked for: each has the alarm's time."""
        first = (self.outcome.kills + 1) * SAVED
        child, pipe = fork(lambda tell: self._save(first, tell))
        told = read_numbers(pipe, self.random.choice((0, 1, 2, 4)))
        time.sleep(self.random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told += read_numbers(pipe)
        if told:
            self._saved = told[-1]
        self.outcome.kills += 1
        self.judge("session", lambda: self._loaded_by_all(first))

    def _save(self, first: int, tell: Callable[[int], None]) -> None:
        """What the child does until it is killed."""
        torch.set_num_threads(1)  # a forked child must not wake the pool of threads that it did not inherit
        for number in range(first, first + SAVED):
            draw = Random(number)
            computes, saves = (MODELS[draw.choice(list(MODELS))] for _ in range(2))
            cache = SequenceCache(self._model)
            with computes(self._model):
                fed(cache, prompt(TOKENS, number))
            with saves(self._model):
                save_session(cache, self._path)
            tell(number)

    def _loaded_by_all(self, first: int) -> Verdict:
        """Load what is there as each of what the model may be."""
        known = self._saved
        if not self._path.exists():
            return Verdict.MISS if known is None else Verdict.LOST
        loaded = [ids for name in MODELS if (ids := self._loaded(name)) is not None]
        if len(loaded) != 1 or not loaded[0]:
            return Verdict.WRONG if loaded else Verdict.LOST
        numbers = [*range(first, first + SAVED), *([] if known is None else [known])]
        found = [number for number in numbers if prompt(TOKENS, number)[0].tolist() == loaded[0][:TOKENS]]
        if not found or max(found) < (known or 0):
            return Verdict.LOST
        self._saved = max(found)  # may be newer than what was acknowledged, and stays until the next is saved
        return Verdict.RIGHT

    def _loaded(self, name: str) -> list[int] | None:
        """The tokens that the file has for a model; none where they are wrong, None where it is of another."""
        with MODELS[name](self._model):
            cache = SequenceCache(self._model)
            try:
                load_session(cache, self._path)
            except StoreError as error:
                if "another model" in str(error):
                    return None
                raise
            if not held_as_stock(cache):
                return []
        with MODELS["off" if name != "off" else "casual"](self._model):
            try:
                fed(cache, prompt(3))
            except ConfigError:
                return cache.tokens()
        return []
