# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding from KV that is on disk, beside KV on the device and transformers' `OffloadedCache`.

Each cache is filled with the same random K and V; then tokens are decoded one at a time, and the caches take turns.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache

from benches.decode import fill, kv_bytes, step
from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bench.shapes import timed_model, wait_for
from hf_blend.model.anatomy import decoder_layers

OURS = "kv_device_map"
RESIDENT = "blend"
DYNAMIC = "DynamicCache"
STOCK = "OffloadedCache"


@dataclass(frozen=True)
class OffloadPlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    contexts: tuple[int, ...] = (4096, 16384)
    excess: float = 4.0
    tokens: int = 8
    rounds: int = 5
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"
    folder: str | None = None


@torch.no_grad()
def measure_offload(plan: OffloadPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Decode with each cache at each context."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows = []
    for context in plan.contexts:
        if progress:
            progress(f"{context} tokens of context")
        with tempfile.TemporaryDirectory(dir=plan.folder) as folder:
            rows += _rows(model, context, plan, folder)
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


def _rows(model: Any, context: int, plan: OffloadPlan, folder: str) -> list[dict[str, Any]]:
    layers = len(decoder_layers(model))
    away = range(round(layers / plan.excess), layers)
    placed: dict[str, Any] = {"kv_device_map": dict.fromkeys(away, "disk"), "offload_folder": folder}
    store = ChunkStore.open("memory://")
    caches: dict[str, Cache] = {
        OURS: BlendCache(model, store, **placed),
        RESIDENT: BlendCache(model, store),
        DYNAMIC: DynamicCache(config=model.config),
    }
    errors: dict[str, str] = {}
    try:
        stock = DynamicCache(config=model.config, offloading=True)
        fill(model, [stock], 1, plan.seed)
        caches[STOCK] = DynamicCache(config=model.config, offloading=True)
    except (RuntimeError, AssertionError, ValueError) as error:
        errors[STOCK] = f"does not run on {plan.device}: {str(error).splitlines()[0]}"
    fill(model, list(caches.values()), context, plan.seed)
    rates, texts = _turns(model, caches, context, plan)
    memory = caches[OURS].kv_memory  # type: ignore[attr-defined]
    bytes_held = {"away_layers": len(away), "disk_bytes": memory.disk_bytes}
    bytes_held |= {"loads": memory.loads, "prefetched": memory.prefetched}
    rows = [
        {
            "context": context,
            "cache": name,
            "kv_bytes": kv_bytes(model, context),
            "tokens_s": rate,
            "vs_device": rate / rates[RESIDENT],
            "vs_offloaded_cache": rate / rates[STOCK] if STOCK in rates else None,
            "equal_text": texts[name] == texts[RESIDENT],
            **(bytes_held if name == OURS else {}),
        }
        for name, rate in rates.items()
    ]
    return rows + [{"context": context, "cache": name, "error": error} for name, error in errors.items()]


def _turns(
    model: nn.Module, caches: dict[str, Cache], context: int, plan: OffloadPlan
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Median tokens a second and the most likely tokens of each cache."""
    rates: dict[str, list[float]] = {name: [] for name in caches}
    texts: dict[str, list[int]] = {name: [] for name in caches}
    for number in range(plan.rounds + 1):  # the first round warms up
        for name, cache in caches.items():
            place = context + number * plan.tokens
            started = time.perf_counter()
            logits = [step(model, cache, place + one) for one in range(plan.tokens)]
            wait_for(model)
            rates[name] += [plan.tokens / (time.perf_counter() - started)] if number else []
            texts[name] += [int(one[0, -1].argmax()) for one in logits]
    return {name: statistics.median(found) for name, found in rates.items()}, texts
