# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what is stored and must not be used: damaged entries, and those of other tokens or other weights."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..model.checks import CheckResult, check, nothing_shown, violations
from ..store import ChunkStore
from .model_under_test import ModelUnderTest, distance

RATIO = 0.3


@check()
def damaged_entries(subject: ModelUnderTest) -> CheckResult:
    """A tampered, truncated or swapped entry on disk is a miss: it is computed again, and no logit changes.

    Every kind of damage is done to every entry of a store.
    """
    errors = []
    for damage in (_flip, _truncate, _swap):
        with tempfile.TemporaryDirectory() as folder:
            expected = _stored_logits(subject, folder)
            damage(sorted(Path(folder).rglob("*.safetensors")))
            with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
                got = subject.blend(subject.prompts[:1], RATIO, store)
            if got.cache.report.loaded_chunks:
                return nothing_shown(f"{damage.__name__[1:]}: {got.cache.report}")
            errors.append(distance(got.logits, expected))
    return CheckResult(max(errors), 0.0)


@check()
def stale_entries(subject: ModelUnderTest) -> CheckResult:
    """An entry that was made from other tokens or by other weights is not used.

    A store that lies about the tokens is found out at layer 0; other weights have another fingerprint.
    """
    return violations([*_of_other_tokens(subject), *_of_other_weights(subject)])


def _stored_logits(subject: ModelUnderTest, folder: str) -> Tensor:
    """Logits of a request whose chunks come from sound entries; NaN if they do not, so that nothing passes unread."""
    with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
        subject.blend(subject.prompts[:1], RATIO, store)
        got = subject.blend(subject.prompts[:1], RATIO, store)
    return got.logits * float("nan") if got.cache.report.computed_chunks else got.logits


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


def _of_other_tokens(subject: ModelUnderTest) -> list[str]:
    prompt, store = subject.prompts[0], ChunkStore.open("memory://")
    for ids in prompt.chunks:
        honest = subject.chunk(ids)
        liar = subject.chunk(tuple(reversed(ids)))
        store.put(replace(liar, key=honest.key))
    report = subject.blend([prompt], RATIO, store).cache.report
    used = len(prompt.chunks) - report.refused_chunks
    return [f"{used} entries of other tokens were used"] if used else []


@torch.no_grad()
def _of_other_weights(subject: ModelUnderTest) -> list[str]:
    store, prompts = ChunkStore.open("memory://"), subject.prompts[:1]
    subject.blend(prompts, RATIO, store)
    weight = subject.model.get_input_embeddings().weight
    before = weight.clone()
    weight.mul_(1.5)
    try:
        loaded = subject.blend(prompts, RATIO, store).cache.report.loaded_chunks
    finally:
        weight.copy_(before)
    return [f"{loaded} entries of other weights were used"] if loaded else []
