# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What must be so after any fault: generation as before it in the same process, and nothing left over in this one."""

import gc
import os
import threading
import time

import torch

from hf_blend import BlendCache, ChunkStore

from .world import World

__all__ = ["Aftermath"]

PREFIX, QUESTION = [1, 3, 4, 5], list(range(80, 89))
NEW_TOKENS = 4
RATIO = 0.3
PATIENCE_S = 5.0  # for threads that still wait for a server


class Aftermath:
    """One request, and what it was answered before anything was injected.

    Args:
        world: its model is asked.
    """

    def __init__(self, world: World) -> None:
        self._model, self._chunks = world.model, [list(ids) for ids in world.chunks[1:4]]
        self._plain = self._generate(None)
        with ChunkStore.open("memory://") as store:
            self._blended = self._generate(store)
        self._before = _held()

    def check(self) -> dict[str, int]:
        """Generate plainly, and blended from a new store.

        Returns:
            `checked` generations, and of them `different`; `leaks` of threads, files and hooks.
        """
        generations = [(self._generate(None), self._plain)]
        with ChunkStore.open("memory://") as store:
            generations += [(self._generate(store), self._blended) for _ in range(2)]
        different = sum(not got.equal(expected) for got, expected in generations)
        return {"checked": len(generations), "different": different, "leaks": self._leaks()}

    def _generate(self, store: ChunkStore | None) -> torch.Tensor:
        """Logits of every new token: `[tokens, vocabulary]`."""
        cache = BlendCache(self._model, store or ChunkStore.open("memory://"), recompute_ratio=RATIO)
        inputs = cache.inputs(None, prefix=PREFIX, chunks=self._chunks, question=QUESTION)
        settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False, "output_logits": True}
        past = {} if store is None else {"past_key_values": cache}
        output = self._model.generate(**inputs, **past, **settings, return_dict_in_generate=True)
        return torch.cat(output.logits)

    def _leaks(self) -> int:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._model.modules())
        deadline_s = time.monotonic() + PATIENCE_S
        while any(now > before for now, before in zip(_held(), self._before, strict=True)):
            if time.monotonic() > deadline_s:
                return hooks + 1
            time.sleep(0.05)
        return hooks


def _held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
