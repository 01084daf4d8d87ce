# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Children that save conversations and sessions under adapters that alternate, until they are killed.

What they leave is loaded under every adapter: under the one that computed it, it is what stock computes; under each
other it is refused.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from hf_blend.context.conversation import Conversation
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.context.session import load_session, save_session
from hf_blend.errors import ConfigError, StoreError
from tests.adapters import adapted, held_as_stock, off, switched, unchanged
from tests.asking import prompt
from tests.chat_templates import small_tokenizer
from tests.sequences import fed

from .fault import FaultClass, Verdict
from .kills import fork, read_numbers

MODELS = {"formal": unchanged, "casual": switched, "off": off}
KINDS = ("session", "conversation")
SAVED = 100  # of one child at most
TOKENS = 12
FEW: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None}


class SavedConversations(FaultClass):
    """What one adapter computed and another may save; the child is killed meanwhile."""

    kill_share = 0.1

    def setup(self) -> None:
        """Let the model be tested as each of what it is, so that children need not."""
        self._tokenizer = small_tokenizer("spaces")
        self._model = adapted(len(self._tokenizer))
        self._saved: dict[str, int] = {}  # by kind, the last that was acknowledged or seen
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
        self._saved |= {KINDS[number % 2]: number for number in told}
        self.outcome.kills += 1
        for kind in KINDS:
            self.judge(kind, lambda: self._look(kind, first))  # noqa: B023

    def _save(self, first: int, tell: Callable[[int], None]) -> None:
        """What the child does until it is killed."""
        torch.set_num_threads(1)  # a forked child must not wake the pool of threads that it did not inherit
        for number in range(first, first + SAVED):
            kind, draw = KINDS[number % 2], Random(number)
            act = self._save_session if kind == "session" else self._save_conversation
            act(number, self.folder / kind, *(MODELS[draw.choice(list(MODELS))] for _ in range(2)))
            tell(number)

    def _save_session(self, number: int, path: Path, computes: Callable[..., Any], saves: Callable[..., Any]) -> None:
        cache = SequenceCache(self._model)
        with computes(self._model):
            fed(cache, prompt(TOKENS, number))
        with saves(self._model):
            save_session(cache, path)

    def _save_conversation(
        self, number: int, path: Path, computes: Callable[..., Any], saves: Callable[..., Any]
    ) -> None:
        chat = Conversation(self._model, self._tokenizer)
        with computes(self._model):
            chat.ask(_question(number), **FEW)
        with saves(self._model):
            chat.save(path)

    def _look(self, kind: str, first: int) -> Verdict:
        """Load what is there as each of what the model may be."""
        path, known = self.folder / kind, self._saved.get(kind)
        if not path.exists():
            return Verdict.MISS if known is None else Verdict.LOST
        loaded = [cache for name in MODELS if (cache := self._loaded(kind, path, name)) is not None]
        if len(loaded) != 1 or not loaded[0]:
            return Verdict.WRONG if loaded else Verdict.LOST
        text = self._tokenizer.decode(loaded[0]) if kind == "conversation" else str(loaded[0])
        numbers = [*range(first, first + SAVED), *([] if known is None else [known])]
        found = [number for number in numbers if self._said(kind, number) in text]
        if not found or max(found) < (known or 0):
            return Verdict.LOST
        self._saved[kind] = max(found)  # may be newer than what was acknowledged, and stays until the next is saved
        return Verdict.RIGHT

    def _loaded(self, kind: str, path: Path, name: str) -> list[int] | None:
        """The tokens that a file has for a model; none where they are wrong, None where it is of another."""
        with MODELS[name](self._model):
            chat = Conversation(self._model, self._tokenizer) if kind == "conversation" else None
            cache = SequenceCache(self._model) if chat is None else chat.cache
            try:
                load_session(cache, path) if chat is None else chat.load(path)
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

    def _said(self, kind: str, number: int) -> str:
        """What is in the words, or the ids, of what was saved under a number."""
        if kind == "session":
            return str(prompt(TOKENS, number)[0].tolist())[1:-1]
        return self._tokenizer.decode(self._tokenizer(_question(number), add_special_tokens=False)["input_ids"])


def _question(number: int) -> str:
    """What a conversation begins with."""
    return f"What is behind door {number}?"
