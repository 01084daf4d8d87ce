# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading the important quarter of a prompt's KV from a cold, throttled disk, beside loading all of it, interleaved.

Both through the public store: `ChunkStore.open(folder, partial=0.25)` beside `ChunkStore.open(folder)`.

Random weights agree between heads no more than chance does, so the shapes have tied heads: all query heads of a layer
are one, and all key heads. Then probe heads agree, as those of trained models mostly do.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from throttled import ThrottledTier
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benches.store import forget
from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.answering import AnswerStreamer

GB = 1e9
WIDTH = 1024
SHAPES = {"8 KV heads of 64": (16, 8, 64), "32 KV heads of 32": (32, 32, 32)}  # query heads, KV heads, width


@dataclass(frozen=True)
class PartialPlan:
    """What is measured."""

    chunks: int = 4
    chunk_tokens: int = 512
    question_tokens: int = 32
    layers: int = 8
    share: float = 0.25
    rates: tuple[float, ...] = (0.5, 1.0, 4.0, 0.0)
    rounds: int = 5
    seed: int = 0
    fallback: str = "whole"


def measure_partial_load(plan: PartialPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measure both shapes at every rate."""
    rows = []
    for name, heads in SHAPES.items():
        model = _tied_model(plan, *heads)
        pieces = _pieces(plan)
        with TemporaryDirectory() as folder:
            for rate in plan.rates:
                if progress:
                    progress(f"{name}, {rate or 'unthrottled'} GB/s")
                rows.append({"shape": name, **_row(model, pieces, plan, rate, Path(folder))})
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


def _row(model: nn.Module, pieces: dict[str, Any], plan: PartialPlan, rate: float, folder: Path) -> dict[str, Any]:
    part_of = {"share": plan.share, "fallback": plan.fallback, "reorder": False}
    stores = {way: _opened(folder / way, part, rate) for way, part in (("whole", None), ("part", part_of))}
    times: dict[str, list[float]] = {way: [] for way in stores}
    reports: dict[str, Any] = {}
    for number in range(plan.rounds + 2):  # the first round computes the chunks, the second warms up
        for way, known in times.items():
            forget(folder)
            ttft_ms, reports[way] = _run(model, stores[way], pieces)
            known += [ttft_ms] if number > 1 else []
    whole = statistics.median(times["whole"])
    part = statistics.median(times["part"])
    found = reports["part"]
    stored = sum(entry.nbytes for entry in stores["whole"].entries())
    for store in stores.values():
        store.close()
    return {
        "rate_gb_s": rate or None,
        "prompt_tokens": len(pieces["prefix"]) + sum(map(len, pieces["chunks"])) + len(pieces["question"]),
        "all_bytes": stored,
        "loaded_bytes": found["loaded_bytes"],
        "fewer_bytes": stored / found["loaded_bytes"],
        "fallback_layers": found["fallback_layers"],
        "layers": len(model.model.layers),
        "unseen_share": found["unseen_share"],
        "all_ttft_ms": whole,
        "partial_ttft_ms": part,
        "ttft_ratio": whole / part,
    }


def _opened(folder: Path, partial: dict[str, Any] | None, rate: float) -> ChunkStore:
    """A store on a disk of some rate, GB/s; with nothing in memory."""
    store: Any = ChunkStore.open(folder, memory_bytes=0, durability="none", partial=partial)
    tier = store.storage.tiers[0]  # bounded; what is behind it is slowed down
    tier.tier = ThrottledTier(tier.tier, rate * GB) if rate else tier.tier
    return store


def _pieces(plan: PartialPlan) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(plan.seed)
    draw = lambda tokens: torch.randint(3, 4096, (tokens,), generator=generator).tolist()  # noqa: E731
    chunks = [draw(plan.chunk_tokens) for _ in range(plan.chunks)]
    return {"prefix": [1], "chunks": chunks, "question": draw(plan.question_tokens)}


def _run(model: Any, store: ChunkStore, pieces: dict[str, Any]) -> tuple[float, Any]:
    """Time to the first token, and what was loaded in part."""
    cache = BlendCache(model, store, recompute_ratio=0.0, selector="none")
    streamer = AnswerStreamer()
    inputs = cache.inputs(None, **pieces)
    model.generate(**inputs, past_key_values=cache, streamer=streamer, do_sample=False, max_new_tokens=2)
    return streamer.ttft_ms, cache.report.partial
