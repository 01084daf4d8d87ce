# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An entry that was made from other tokens or by other weights is not used."""

import torch

from ..store import ChunkStore
from .base import Check, Outcome, violations
from .subject import ModelUnderTest

RATIO = 0.3


class StaleEntries(Check):
    """A store that lies about the tokens is found out at layer 0; other weights have another fingerprint."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of stale entries that were used; 0 is allowed."""
        return violations([*_of_other_tokens(subject), *_of_other_weights(subject)])


def _of_other_tokens(subject: ModelUnderTest) -> list[str]:
    from dataclasses import replace

    prompt, store = subject.prompts[0], ChunkStore.open("memory://")
    for ids in prompt.chunks:
        honest = subject.chunk(ids)
        liar = subject.chunk(tuple(reversed(ids)))
        store.put(replace(liar, key=honest.key))
    report = subject.blend([prompt], RATIO, store).cache.report
    used = len(prompt.chunks) - report.refused_chunks
    return [f"{used} entries of other tokens were used"] if used else []


def _of_other_weights(subject: ModelUnderTest) -> list[str]:
    store, prompts = ChunkStore.open("memory://"), subject.prompts[:1]
    subject.blend(prompts, RATIO, store)
    weight = subject.model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    try:
        loaded = subject.blend(prompts, RATIO, store).cache.report.loaded_chunks
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    return [f"{loaded} entries of other weights were used"] if loaded else []
