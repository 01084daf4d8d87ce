# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Bytes first: what `ChunkStore.open(partial=…)` loads of a trained model's chunks, and what that costs in answers.

Chunks are stored, the store is closed and opened again, and every question is asked of what is on disk: loaded whole,
and loaded in part in several ways. Each question is its own pair, so the difference is that of the same questions.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.chains.sampling import sample_examples as chain_examples
from hf_blend.evaluation.world.sampling import sample_examples as world_examples

ANSWER_TOKENS = 4
GROUP = 20  # questions whose chunks are on disk at a time
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "whole": None,
    "25 %": {"share": 0.25},
    "25 %, values": {"share": 0.25, "fallback": "values"},
    "10 %, values": {"share": 0.1, "fallback": "values"},
}


def measure_partial_quality(
    count: int = 200,
    model: str = "chains",
    batch: int = 1,
    ratio: float = 0.15,
    seed: int = 21,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Bytes, answers and time of every way to load, over the same questions.

    Args:
        count: questions.
        model: "chains", "reference", or a folder of a model with the chain model's tokenizer.
        batch: questions of one forward.
        ratio: share of the tokens that is recomputed, chosen by kv-deviation.
        seed: of the questions.
        progress: called with a line of text after each group of questions.

    Returns:
        `rows`, one for each way: bytes loaded and stored, answers paired with those over all KV.
    """
    loaded, tokenizer = load_model(model)
    examples: Sequence[Any] = (world_examples if model == "reference" else chain_examples)(count, seed)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for start in range(0, count, GROUP):
        group = examples[start : start + GROUP]
        with TemporaryDirectory() as folder:
            with _opened(folder, "whole") as store:
                keys = _compute(loaded, tokenizer, store, group)
            with _opened(folder, "25 %") as store:
                for key in keys:
                    store.stream(key, _never)  # writes the blocks, of all ways
            for way in WAYS:  # each behind a restart
                with _opened(folder, way) as store:
                    found[way] += _ask(loaded, tokenizer, store, group, batch, ratio)
        if progress:
            right = {way: sum(one["right"] for one in rows) for way, rows in found.items()}
            progress(f"{start + len(group)} of {count}: {right}")
    whole = found["whole"]
    for row, other in zip(whole, found["25 %"], strict=True):
        row["loaded_bytes"] = row["all_bytes"] = other["all_bytes"]
    rows = [{"way": way, **_row(rows, whole)} for way, rows in found.items()]
    shape = loaded.config.get_text_config()
    about = {"model": Path(model).name, "kv_heads": shape.num_key_value_heads, "layers": shape.num_hidden_layers}
    return {**about, "n": count, "batch": batch, "recompute_ratio": ratio, "seed": seed,
            "threads": torch.get_num_threads(), "rows": rows}  # fmt: skip


def _opened(folder: str, way: str) -> ChunkStore:
    given = WAYS[way]
    partial = None if given is None else {**given, "reorder": False}
    return ChunkStore.open(Path(folder), memory_bytes=0, durability="none", partial=partial)


def _compute(model: Any, tokenizer: Any, store: ChunkStore, examples: Sequence[Any]) -> list[Any]:
    chunks = [tokenizer(chunk, add_special_tokens=False)["input_ids"] for one in examples for chunk in one.chunks]
    return store.add(model, None, chunks)


def _never() -> Any:
    raise AssertionError("a chunk that was stored a moment ago is damaged")


@torch.no_grad()
def _ask(
    model: Any, tokenizer: Any, store: ChunkStore, examples: Sequence[Any], batch: int, ratio: float
) -> list[dict[str, Any]]:
    """Answers and bytes of each question; those of a batch share its bytes and its time evenly."""
    found = []
    for start in range(0, len(examples), batch):
        few = examples[start : start + batch]
        cache = BlendCache(model, store, recompute_ratio=ratio)
        began = time.perf_counter()
        inputs = cache.inputs(
            tokenizer, chunks=[list(one.chunks) for one in few], question=[one.question for one in few]
        )
        ids = model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        seconds = (time.perf_counter() - began) / len(few)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        part = cache.report.partial or {}
        for one, text in zip(few, texts, strict=True):
            found.append(
                {
                    "right": float(text.strip() == one.answer),
                    "text": text.strip(),
                    "seconds": seconds,
                    **{name: part.get(name, 0) / len(few) for name in (*BYTES, *LAYERS, "unseen_share")},
                }
            )
    return found


BYTES = ("loaded_bytes", "all_bytes")
LAYERS = ("partial_layers", "fallback_layers", "whole_layers")


def _row(rows: list[dict[str, Any]], whole: list[dict[str, Any]]) -> dict[str, Any]:
    mean = {name: statistics.mean(one[name] for one in rows) for name in (*BYTES, *LAYERS)}
    right = [one["right"] for one in rows]
    gaps = [new["right"] - old["right"] for new, old in zip(rows, whole, strict=True)]
    return {
        **mean,
        "loaded_share": mean["loaded_bytes"] / mean["all_bytes"] if mean["all_bytes"] else None,
        "n": len(rows),
        "exact_match": statistics.mean(right),
        "interval": interval(right),
        "difference": statistics.mean(gaps),
        "difference_interval": interval(gaps),
        "same_answers": statistics.mean(new["text"] == old["text"] for new, old in zip(rows, whole, strict=True)),
        "unseen_share": statistics.mean(one["unseen_share"] for one in rows),
        "seconds": statistics.median(one["seconds"] for one in rows),
        "time_ratio": statistics.median(old["seconds"] / new["seconds"] for new, old in zip(rows, whole, strict=True)),
    }
