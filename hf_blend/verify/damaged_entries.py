# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tampered, truncated or swapped entry on disk is a miss: it is computed anew, and no logit changes."""

import tempfile
from pathlib import Path

from torch import Tensor

from ..store import ChunkStore
from .base import Check, Outcome
from .floor import distance
from .subject import ModelUnderTest

RATIO = 0.3


class DamagedEntries(Check):
    """Every kind of damage is done to every entry of a store on disk."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of logits from those with a sound store; 0 is allowed."""
        errors = []
        for damage in (_flip, _truncate, _swap):
            with tempfile.TemporaryDirectory() as folder:
                wanted = _logits(subject, folder)
                damage(sorted(Path(folder).rglob("*.safetensors")))
                with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
                    got = subject.blend(subject.prompts[:1], RATIO, store)
                if got.cache.report.loaded_chunks:
                    return Outcome(float("inf"), 0.0, f"{damage.__name__[1:]}: {got.cache.report}")
                errors.append(distance(got.asked, wanted))
        return Outcome(max(errors), 0.0)


def _logits(subject: ModelUnderTest, folder: str) -> Tensor:
    """Logits of a request whose chunks come from sound entries; NaN if they do not, so that nothing passes unread."""
    with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
        subject.blend(subject.prompts[:1], RATIO, store)
        got = subject.blend(subject.prompts[:1], RATIO, store)
    return got.asked * float("nan") if got.cache.report.computed_chunks else got.asked


def _flip(entries: list[Path]) -> None:
    for path in entries:
        content = bytearray(path.read_bytes())
        content[-len(content) // 3] ^= 1
        path.write_bytes(content)


def _truncate(entries: list[Path]) -> None:
    for path in entries:
        path.write_bytes(path.read_bytes()[:-100])


def _swap(entries: list[Path]) -> None:
    contents = [path.read_bytes() for path in entries]
    for path, content in zip(entries, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
