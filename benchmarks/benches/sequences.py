# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A decoding step of several sequences that share a prefix: one storage against stock caches with a copy for each."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, StaticCache

from hf_blend import SequenceCache
from hf_blend.evaluation.bench.shapes import text_config, timed_model, wait_for


@dataclass(frozen=True)
class SequencesPlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    prefix_tokens: int = 4096
    tails: tuple[int, ...] = (16, 64, 256)
    sequences: int = 8
    rounds: int = 7
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


@torch.no_grad()
def measure_sequences(plan: SequencesPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Decode a batch behind a shared prefix in one storage and in stock caches, step by step in turn."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    draw = torch.Generator().manual_seed(plan.seed)
    cache = SequenceCache(model)
    rows = []
    with cache:
        model(_ids(model, 1, plan.prefix_tokens, draw), past_key_values=cache, logits_to_keep=1)
        prefix_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)  # type: ignore[union-attr]
        cache.fork(plan.sequences)
        for tail in plan.tails:
            if progress:
                progress(f"{plan.sequences} sequences of {plan.prefix_tokens} shared tokens and {tail} of their own")
            more = tail - (cache.get_seq_length() - plan.prefix_tokens)
            model(_ids(model, plan.sequences, more, draw), past_key_values=cache, logits_to_keep=1)
            rows.append(_row(model, cache, plan, prefix_bytes, draw))
    return {"threads": torch.get_num_threads(), **vars(plan), "prefix_bytes": prefix_bytes, "rows": rows}


def _row(
    model: nn.Module, cache: SequenceCache, plan: SequencesPlan, prefix_bytes: int, draw: torch.Generator
) -> dict[str, Any]:
    """Measure steps, and leave their tokens in the cache."""
    held = cache.get_seq_length()
    stock = _stock(cache)
    static = _stock(cache, held + plan.rounds)
    caches = {"stock": stock, "static": static, "shared": cache}
    times: dict[str, list[float]] = {name: [] for name in caches}
    apart = 0.0
    for _ in range(plan.rounds):
        ids = _ids(model, plan.sequences, 1, draw)
        logits = []
        for name, one in caches.items():
            started = time.perf_counter()
            logits.append(model(ids, past_key_values=one).logits)
            wait_for(model)
            times[name].append(1e3 * (time.perf_counter() - started))
        apart = max(apart, float((logits[0] - logits[-1]).abs().max() / logits[0].abs().max()))
    tokens = plan.sequences * (cache.get_seq_length() - plan.prefix_tokens)
    tails = prefix_bytes // plan.prefix_tokens * tokens
    median = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        "tail_tokens": held - plan.prefix_tokens,
        **{f"{name}_ms": taken for name, taken in median.items()},
        "shared_over_stock": median["shared"] / median["stock"],
        "shared_over_static": median["shared"] / median["static"],
        "largest_logit_difference": apart,
        "nbytes": cache.nbytes,
        "stock_nbytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in stock.layers),  # type: ignore[union-attr]
        "over_prefix_without_tails": (cache.nbytes - tails) / prefix_bytes,
    }


def _stock(cache: SequenceCache, tokens: int | None = None) -> Cache:
    """A stock cache with what each active sequence holds; of a fixed size, if `tokens` is given."""
    state = cache.state()
    stock = DynamicCache() if tokens is None else StaticCache(cache.model.config, max_cache_len=tokens)
    rows = [state[f"sequence.{number}"][0] for number in cache.batch]
    for index in range(len(cache.layers)):
        parts = (state[f"layer.{index}.{part}"] for part in "kv")
        stock.update(*(torch.stack([part[:, row] for row in rows]) for part in parts), index)
    return stock


def _ids(model: Any, rows: int, tokens: int, draw: torch.Generator) -> Tensor:
    return torch.randint(3, text_config(model).vocab_size, (rows, tokens), generator=draw).to(model.device)
