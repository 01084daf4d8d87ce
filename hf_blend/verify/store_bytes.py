# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A request changes no byte of the store, and neither does its answer."""

import hashlib

import torch

from ..model.fingerprint import fingerprint
from ..store import ChunkStore
from ..store.chunk import ChunkKey
from .base import Check, Outcome, violations
from .subject import ModelUnderTest


class StoreBytes(Check):
    """Chunks are shared between requests, in memory too."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of chunks that changed after prefills at three ratios and a few generated tokens; 0 is allowed."""
        store, prompt = ChunkStore.open("memory://"), subject.prompts[0]
        keys = [ChunkKey(fingerprint(subject.model), subject.chunk_prefix_ids, ids) for ids in prompt.chunks]
        subject.blend([prompt], 0.0, store)
        before = [_digest(store, key) for key in keys]
        for ratio in (0.0, 0.3, 1.0):
            cache = subject.cache(ratio, store)
            inputs = subject.inputs(cache, subject.prompts)
            inputs.pop("position_ids")
            subject.model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False, pad_token_id=0)
        changed = [f"chunk {number}" for number, key in enumerate(keys) if _digest(store, key) != before[number]]
        return violations(changed)


def _digest(store: ChunkStore, key: ChunkKey) -> str:
    chunk, state = store.get(key), hashlib.sha256()
    for name, tensor in [] if chunk is None else chunk.named_tensors():
        state.update(name.encode())
        state.update(tensor.contiguous().view(torch.uint8).cpu().numpy())
    return state.hexdigest()
