# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A blended prefill of a hybrid model beside a stock one, and beside what the parts of the stock one allow.

    bound = products · share of their FLOPs + attention · share of its FLOPs + scan

All three times are taken inside the stock prefill of the same round. The scan is what a mixer does between its
projections: convolution, recurrence, gates and norms, which run over all tokens in both. The attention is the call of
the attention kernel. The products are all the rest: projections, MLP, norms, embedding. The shares are those that the
blend is charged for, with layer 0 in full and with the check layer as far as its projections.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.model.mixer_probe import mixers_of
from hf_blend.store.chunk import ChunkKey

from .shapes import random_model, wait_for

STORED = ("keys_values", "projections")


@dataclass(frozen=True)
class HybridsPlan:
    """What is measured.

    Attributes:
        shapes: names of model shapes with mixers.
        chunks: how many chunks stand before the question.
        chunk_tokens: length of each.
        question_tokens: length of the question.
        ratio: recompute ratio.
        selector: which tokens are recomputed.
        rounds: of stock and blend, in turn; medians count.
        dtype: of weights and states.
        device: where the model runs.
        seed: of weights and tokens.
    """

    shapes: tuple[str, ...] = ("lfm2-350m", "qwen3.5-12-layers")
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = 0.15
    selector: str = "kv-deviation"
    rounds: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0


@torch.no_grad()
def measure_hybrids(plan: HybridsPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Time stock and blended prefills of each shape in turn.

    Args:
        plan: what to measure.
        progress: called with a line of text before each round.

    Returns:
        `rows`, one for each shape, and what was measured.
    """
    rows = [_row(shape, plan, progress or (lambda _: None)) for shape in plan.shapes]
    settings = {name: value for name, value in vars(plan).items() if name != "shapes"}
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **settings, "rows": rows}


def _row(shape: str, plan: HybridsPlan, progress: Callable[[str], None]) -> dict[str, Any]:
    model = random_model(shape, getattr(torch, plan.dtype), plan.device, plan.seed)
    draw = torch.Generator().manual_seed(plan.seed)
    ids = lambda count: torch.randint(3, model.config.vocab_size, (count,), generator=draw).tolist()  # noqa: E731
    pieces = {"chunks": [ids(plan.chunk_tokens) for _ in range(plan.chunks)], "question": ids(plan.question_tokens)}
    store, kept = ChunkStore.open("memory://", memory_bytes=64 << 30), []
    for number in range(plan.rounds + 1):  # the first round fills the store
        progress(f"{shape}: round {number} of {plan.rounds}")
        cache = BlendCache(model, store, recompute_ratio=plan.ratio, selector=plan.selector)
        inputs = cache.inputs(None, **pieces)
        parts = _stock(model, inputs)
        blend_ms = _timed(model, {**inputs, "past_key_values": cache})
        kept.append({**parts, "blend_ms": blend_ms, "bound_ms": _bound(parts, cache.report.flop_shares())})
    figures, (key,) = _figures(kept[1:]), store.add(model, None, pieces["chunks"][:1])
    sizes, layers = _bytes(model, store, key), len(mixers_of(model))
    loaded = plan.chunks * plan.chunk_tokens * sum(sizes[f"{one}_bytes_per_token"] for one in STORED)
    most_ms = figures["stock_ms"] * layers / (layers + 1)  # the loading of one layer is hidden behind nothing
    least = {"least_tier_mb_s": loaded / 1e3 / most_ms}
    return {"shape": shape, **_sizes(model, inputs), **figures, **_costs(cache), **sizes, **least}


def _timed(model: nn.Module, inputs: dict[str, Any]) -> float:
    started = time.perf_counter()
    model(**inputs, use_cache=True, logits_to_keep=1)
    wait_for(model)
    return 1e3 * (time.perf_counter() - started)


def _stock(model: nn.Module, inputs: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a stock prefill, and of its scans and attention."""
    spent = {"mixer": 0.0, "projection": 0.0, "attention": 0.0}
    attend = nn.functional.scaled_dot_product_attention

    def attention(*args: Any, **given: Any) -> Any:
        with _clock(model, spent, "attention"):
            return attend(*args, **given)

    with _watched(model, spent), patch.object(nn.functional, "scaled_dot_product_attention", attention):
        stock_ms = _timed(model, inputs)
    return {"stock_ms": stock_ms, "scan_ms": spent["mixer"] - spent["projection"], "attention_ms": spent["attention"]}


@contextmanager
def _clock(model: nn.Module, spent: dict[str, float], name: str) -> Iterator[None]:
    wait_for(model)
    started = time.perf_counter()
    yield
    wait_for(model)
    spent[name] += 1e3 * (time.perf_counter() - started)


@contextmanager
def _watched(model: nn.Module, spent: dict[str, float]) -> Iterator[None]:
    """Time every mixer, and the linear modules inside it that a blend runs for its rows only."""
    handles: list[Any] = []

    def watch(module: nn.Module, name: str) -> None:
        clock: list[Any] = []

        def begins(*_: Any) -> None:
            clock.append(_clock(model, spent, name))
            clock[-1].__enter__()

        def ends(*_: Any) -> None:
            clock.pop().__exit__(None, None, None)

        handles.extend([module.register_forward_pre_hook(begins), module.register_forward_hook(ends)])

    for mixer in filter(None, mixers_of(model)):
        watch(mixer.module, "mixer")
        for projection in mixer.projections:
            watch(projection.module, "projection")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _bound(parts: dict[str, float], shares: dict[str, float]) -> float:
    """Milliseconds of a blend that costs nothing beside its share of the stock prefill's parts."""
    products = parts["stock_ms"] - parts["scan_ms"] - parts["attention_ms"]
    return products * shares["products"] + parts["attention_ms"] * shares["attention"] + parts["scan_ms"]


def _sizes(model: nn.Module, inputs: dict[str, Any]) -> dict[str, int]:
    mixers = mixers_of(model)
    return {"layers": len(mixers), "mixers": sum(map(bool, mixers)), "tokens": inputs["input_ids"].shape[1]}


def _figures(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of times, and of their ratios within a round."""
    median = lambda value: statistics.median(map(value, rounds))  # noqa: E731
    return {
        **{name: median(lambda one, name=name: one[name]) for name in rounds[0]},
        "speedup": median(lambda one: one["stock_ms"] / one["blend_ms"]),
        "bound": median(lambda one: one["stock_ms"] / one["bound_ms"]),
        "share_of_bound": median(lambda one: one["bound_ms"] / one["blend_ms"]),
        "least_share_of_bound": min(one["bound_ms"] / one["blend_ms"] for one in rounds),
    }


def _costs(cache: BlendCache) -> dict[str, float]:
    report = cache.report
    shares = {f"{name}_share": share for name, share in report.flop_shares().items()}
    return {"charged_budget": report.charged_budget, **shares, "flop_bound": report.flop_bound}


def _bytes(model: nn.Module, store: ChunkStore, key: ChunkKey) -> dict[str, float]:
    """Bytes of a token as stored, and as they would be with every column of the input projections."""
    sizes = dict.fromkeys(STORED, 0)
    chunk = store.get(key)
    for name, tensor in chunk.named_tensors():  # type: ignore[union-attr]
        if name.startswith("layer"):
            sizes["projections" if name.endswith(".p") else "keys_values"] += tensor.nbytes // tensor.shape[1]
    every = sum(mixer.full_width for mixer in filter(None, mixers_of(model)))
    itemsize = next(model.parameters()).element_size()
    found = {f"{name}_bytes_per_token": size for name, size in sizes.items()}
    return {**found, "all_columns_bytes_per_token": every * itemsize}
