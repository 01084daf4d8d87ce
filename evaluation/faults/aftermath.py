# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What must be so after any fault: generation as in a clean process, and nothing left over in this one."""

import os
import tempfile
import threading
from pathlib import Path

import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.ladder.zoo import tiny_model
from hf_blend.testing import FaultyTier

__all__ = ["Aftermath"]

TIMES = 3
NEW_TOKENS = 4
RATIO = 0.3
FAULTY = {"open.io": 0.2, "open.absent": 0.1, "read.flip": 0.1, "read.io": 0.05, "put.io": 0.2, "put.torn": 0.1}


class Aftermath:
    """A tiny model with one request, and what it answered before anything was injected."""

    def __init__(self) -> None:
        self._model = tiny_model("llama")
        pieces = ((3, 4, 5), tuple(range(10, 40)), tuple(range(50, 75)), tuple(range(80, 89)))
        self._chunks, self._question = [list(piece) for piece in pieces[1:3]], list(pieces[3])
        self._prefix = list(pieces[0])
        self._plain = self._generate(None)
        with ChunkStore.open("memory://") as store:
            self._blended = self._generate(store)
        self._faulty_seed = 0
        self._before = _held()

    def check(self) -> dict[str, int]:
        """Blend through a store that fails, then three times plainly and three times blended.

        Returns:
            `checked` generations, and of them `different`; `leaks` of threads, files and hooks.
        """
        generations = [(self._generate(None), self._plain) for _ in range(TIMES)]
        generations += [(self._through_faults(), self._blended) for _ in range(TIMES)]
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(TIMES):
                with ChunkStore.open(Path(folder), durability="none") as store:
                    generations.append((self._generate(store), self._blended))
        different = sum(not got.equal(wanted) for got, wanted in generations)
        return {"checked": len(generations), "different": different, "leaks": self._leaks()}

    def _generate(self, store: ChunkStore | None) -> torch.Tensor:
        """Logits of every new token: `[tokens, vocabulary]`."""
        cache = BlendCache(self._model, store or ChunkStore.open("memory://"), recompute_ratio=RATIO)
        inputs = cache.inputs(None, prefix=self._prefix, chunks=self._chunks, question=self._question)
        settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False, "output_logits": True}
        past = {} if store is None else {"past_key_values": cache}
        output = self._model.generate(**inputs, **past, **settings, return_dict_in_generate=True)
        return torch.cat(output.logits)

    def _through_faults(self) -> torch.Tensor:
        """A blended generation while its store fails under it: what is missed is computed, to the same bits."""
        from .memory import MemoryTier

        self._faulty_seed += 1
        tier = FaultyTier(MemoryTier(), self._faulty_seed, FAULTY)
        store = ChunkStore([], [tier])
        self._generate(store)
        return self._generate(store)

    def _leaks(self) -> int:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._model.modules())
        return hooks + sum(now > before for now, before in zip(_held(), self._before, strict=True))


def _held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
