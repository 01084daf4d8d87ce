# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding speed of a blend cache beside transformers' own dynamic and static caches, interleaved.

Each cache is filled with the same random K and V; then tokens are decoded one at a time, and the caches take turns.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bench.shapes import text_config, timed_model, wait_for
from hf_blend.model.anatomy import input_device

OURS = "blend"
DYNAMIC = "dynamic"
STATIC = "static"


@dataclass(frozen=True)
class DecodePlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    contexts: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 8
    rounds: int = 7
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


@torch.no_grad()
def measure_decode(plan: DecodePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Decode with each cache at each context."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows = []
    for context in plan.contexts:
        if progress:
            progress(f"{context} tokens of context")
        rows.append(_row(model, context, plan))
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


def _row(model: nn.Module, context: int, plan: DecodePlan) -> dict[str, Any]:
    room = (plan.rounds + 1) * plan.tokens
    caches = _caches(model, context, room)
    fill(model, list(caches.values()), context, plan.seed)
    rates: dict[str, list[float]] = {name: [] for name in caches}
    for number in range(plan.rounds + 1):  # the first round warms up
        for name, cache in caches.items():
            rate = _decode(model, cache, context + number * plan.tokens, plan.tokens)
            rates[name] += [rate] if number else []
    median = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "context": context,
        **{f"{name}_tokens_s": rate for name, rate in median.items()},
        "vs_dynamic": median[OURS] / median[DYNAMIC],
        "vs_static": median[OURS] / median[STATIC],
    }


def _caches(model: nn.Module, context: int, room: int) -> dict[str, Cache]:
    static = StaticCache(config=model.config, max_cache_len=context + room)
    return {OURS: BlendCache(model, ChunkStore.open("memory://")), DYNAMIC: DynamicCache(), STATIC: static}


def fill(model: Any, caches: list[Cache], context: int, seed: int) -> None:
    """The same random K and V in every layer of every cache, `[1, kv_heads, context, head_dim]`."""
    config = text_config(model)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, config.num_key_value_heads, context, head_width(config))
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(2))
        for cache in caches:
            if isinstance(cache, BlendCache):
                cache.layers[layer].update(keys, values)  # the cache itself takes those of a forward only
            else:
                cache.update(keys, values, layer)


def _decode(model: nn.Module, cache: Cache, position: int, tokens: int) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    for place in range(position, position + tokens):
        step(model, cache, place)
    wait_for(model)
    return tokens / (time.perf_counter() - started)


def step(model: nn.Module, cache: Cache, place: int) -> Tensor:
    """Decode one token at a position; its logits, `[1, 1, vocabulary]`."""
    ids, positions = torch.tensor([[[7]], [[place]]], device=input_device(model))
    output: Tensor = model(ids, past_key_values=cache, position_ids=positions, use_cache=True).logits
    return output


def head_width(config: Any) -> int:
    """Return how wide K and V of a head are."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Count the bytes of K and V of some tokens, in the model's dtype."""
    config = text_config(model)
    itemsize = next(model.parameters()).element_size()
    return int(2 * tokens * config.num_key_value_heads * head_width(config) * itemsize * config.num_hidden_layers)
