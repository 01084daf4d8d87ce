# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding speed over selected blocks beside dense decoding of the same cache, interleaved.

K and V are random, so which blocks are best changes with every step more than in text: what is measured is the cost.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benches.decode import fill, step
from hf_blend import BlendCache, ChunkStore, sparse_decoding
from hf_blend.evaluation.bench.shapes import timed_model, wait_for

DENSE = "dense"


@dataclass(frozen=True)
class SparsePlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    contexts: tuple[int, ...] = (4096, 16384, 32768)
    shares: tuple[float, ...] = (0.5, 0.25, 0.1)
    method: str = "gsa"
    tokens: int = 32
    rounds: int = 5
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


@torch.no_grad()
def measure_sparse_decode(plan: SparsePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Decode with every share, locked and unlocked, at each context."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows = []
    for context in plan.contexts:
        if progress:
            progress(f"{context} tokens of context")
        rows += _rows(model, context, plan)
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


def _rows(model: nn.Module, context: int, plan: SparsePlan) -> list[dict[str, Any]]:
    cache = BlendCache(model, ChunkStore.open("memory://"))
    fill(model, [cache], context, plan.seed)
    ways: dict[str, dict[str, Any]] = {DENSE: {}}
    for share in plan.shares:
        ways |= {f"{share} locked": {"share": share}, f"{share} unlocked": {"share": share, "lock": False}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(plan.rounds + 1):  # the first round warms up
        for name, settings in ways.items():
            seconds = _decode(model, cache, context, plan, settings)
            times[name] += [seconds] if number else []
    dense = statistics.median(times[DENSE])
    return [
        {
            "context": context,
            "way": name,
            **settings,
            "tokens_s": plan.tokens / statistics.median(times[name]),
            "vs_dense": dense / statistics.median(times[name]),
        }
        for name, settings in ways.items()
    ]


def _decode(model: nn.Module, cache: BlendCache, context: int, plan: SparsePlan, settings: dict[str, Any]) -> float:
    """Seconds for a turn, from the first selection on; the cache is as before."""
    door: AbstractContextManager[Any] = nullcontext()
    if "share" in settings:
        door = sparse_decoding(model, cache, method=plan.method, min_tokens=0, **settings)
    with door:
        started = time.perf_counter()
        for place in range(context, context + plan.tokens):
            step(model, cache, place)
        wait_for(model)
        seconds = time.perf_counter() - started
    cache.crop(-plan.tokens)
    return seconds
