# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading the important quarter of a prompt's KV from a cold, throttled disk, beside loading all of it, interleaved.

Random weights agree between heads no more than chance does, so the shapes have tied heads: all query heads of a layer
are one, and all key heads. Then probe heads agree, as those of trained models mostly do.
"""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.sparse.partial.loading import LoadReport, partial_loading
from hf_blend.sparse.partial.store import PartialStore
from hf_blend.store.throttled import ThrottledTier

from .cold import forget
from .ttft import Clock

GB = 1e9
WIDTH = 1024
SHAPES = {"8 KV heads of 64": (16, 8, 64), "32 KV heads of 32": (32, 32, 32)}  # query heads, KV heads, width


@dataclass(frozen=True)
class PartialPlan:
    """What is measured.

    Attributes:
        chunks: behind a prefix of one token.
        chunk_tokens: of each.
        question_tokens: of the question.
        layers: of the models.
        share: of the blocks that is loaded.
        rates: of the disk, GB/s; 0 is as fast as it is.
        rounds: how often each way is measured; the median counts.
        seed: of weights and tokens.
    """

    chunks: int = 4
    chunk_tokens: int = 512
    question_tokens: int = 32
    layers: int = 8
    share: float = 0.25
    rates: tuple[float, ...] = (0.5, 1.0, 4.0, 0.0)
    rounds: int = 5
    seed: int = 0


def measure_partial_load(plan: PartialPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure both shapes at every rate.

    Args:
        plan: what to measure.
        progress: called with a line of text before each row.

    Returns:
        `rows`: bytes of all and of what was loaded, times to the first token, the share of fallback layers.
    """
    rows = []
    for name, shape in SHAPES.items():
        model = _tied_model(plan, *shape)
        with TemporaryDirectory() as folder:
            for rate in plan.rates:
                if progress:
                    progress(f"{name}, {rate or 'unthrottled'} GB/s")
                rows.append({"shape": name, **_row(model, plan, rate, Path(folder))})
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


@torch.no_grad()
def _tied_model(plan: PartialPlan, heads: int, kv_heads: int, width: int) -> Any:
    config = AutoConfig.for_model(
        "llama", hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=plan.layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width, vocab_size=4096,
        max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(plan.seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            one = linear.weight[:width] * 3
            linear.weight.copy_(one.repeat(linear.weight.shape[0] // width, 1))
    return model


def _row(model: nn.Module, plan: PartialPlan, rate: float, folder: Path) -> dict[str, Any]:
    disk = plugins.load("store.tiers", "disk")(folder, durable=False)
    tier = ThrottledTier(disk, rate * GB) if rate else disk
    store, pieces = PartialStore(ChunkStore.open("memory://"), tier), _pieces(plan)
    times: dict[float, list[float]] = {1.0: [], plan.share: []}
    reports = {}
    for number in range(plan.rounds + 2):  # the first round computes the chunks, the second warms up
        for share, known in times.items():
            forget(folder)
            ttft_ms, reports[share] = _run(model, store, pieces, share)
            known += [ttft_ms] if number > 1 else []
    whole, part = (statistics.median(times[share]) for share in (1.0, plan.share))
    loaded, every = reports[plan.share], reports[1.0]
    return {
        "rate_gb_s": rate or None,
        "all_bytes": every.loaded_bytes,
        "loaded_bytes": loaded.loaded_bytes,
        "fewer_bytes": every.loaded_bytes / loaded.loaded_bytes,
        "fallback_layers": loaded.fallback_layers,
        "layers": plan.layers,
        "unseen_share": loaded.unseen_share,
        "all_ttft_ms": whole,
        "partial_ttft_ms": part,
        "ttft_ratio": whole / part,
    }


def _pieces(plan: PartialPlan) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(plan.seed)
    draw = lambda tokens: torch.randint(3, 4096, (tokens,), generator=generator).tolist()  # noqa: E731
    chunks = [draw(plan.chunk_tokens) for _ in range(plan.chunks)]
    return {"prefix": [1], "chunks": chunks, "question": draw(plan.question_tokens)}


def _run(model: Any, store: PartialStore, pieces: dict[str, Any], share: float) -> tuple[float, Any]:
    """Time to the first token, and what was loaded; a share of 1 is stock reuse, all blocks of a layer at once."""
    made: Any = store
    cache = BlendCache(model, made, recompute_ratio=0.0, selector="none")
    clock = Clock()
    door: AbstractContextManager[Any] = nullcontext()
    if share < 1:
        door = partial_loading(model, cache, share=share)
    readers: list[Any] = []
    stream = store.stream
    with door as loading:
        store.stream = lambda *given, **named: _kept(stream(*given, **named), readers)  # type: ignore[method-assign]
        try:
            inputs = cache.inputs(None, **pieces)
            model.generate(**inputs, past_key_values=cache, streamer=clock, do_sample=False, max_new_tokens=2)
        finally:
            del store.stream
    report = loading.report if loading is not None else _whole(readers)
    return clock.ttft_ms, report


def _kept(chunk: Any, readers: list[Any]) -> Any:
    if chunk is not None:
        readers.append(chunk.layers.reader)
    return chunk


def _whole(readers: list[Any]) -> Any:
    loaded, every = (sum(getattr(one, name) for one in readers) for name in ("loaded_bytes", "nbytes"))
    return LoadReport(loaded_bytes=loaded, all_bytes=every)
