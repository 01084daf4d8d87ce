# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Why a few tokens suffice, over a data set instead of one prompt: means of `Inspector` over samples.

Source: CacheBlend (arXiv 2405.16444), figures 6 to 8, section 4.3.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_blend import ChunkStore
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.inspecting import Inspector
from hf_blend.evaluation.summary import interval
from hf_blend.evaluation.trial import EvalConfig, load_task

RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0)
BLEND, RATIO = "kv-deviation", 0.15
Progress = Callable[[str, Iterator[Any], int], Any]


def deviations(
    base: EvalConfig,
    folder: Path,
    progress: Progress | None = None,
    load: Callable[..., tuple[Any, Any]] = load_model,
) -> list[dict[str, Any]]:
    """Deviation, rank correlation and sparsity by layer, and attention deviation by ratio."""
    model, tokenizer = load(base.models[0], base.device, base.dtype or "auto")
    with RunFolder(folder, {**base.settings, "deviation_ratios": RATIOS}) as opened:
        for name in base.tasks:
            samples = load_task(base, name, tokenizer).samples(base.limit, base.shape())
            for sample in progress(f"{name}, deviation", iter(samples), len(samples)) if progress else samples:
                about = {"task": name, "model": base.models[0], "method": BLEND, "ratio": None, "id": sample.id}
                if tuple(about.values()) in opened.lines:
                    continue
                pieces = {"prefix": sample.prefix, "chunks": sample.chunks, "question": sample.question}
                found = Inspector(model, tokenizer, ChunkStore.open("memory://"), pieces).look([BLEND], RATIO, RATIOS)
                means = [statistics.fmean(layer) for layer in found.deviation]
                by_layer = {"deviation": means, "rank_correlation": found.rank_correlation, "sparsity": found.sparsity}
                opened.add([{**about, **by_layer, "attention": found.attention_deviation}])
        lines = list(opened.lines.values())
    layers = range(len(lines[0]["deviation"]))
    return [
        {"name": "deviation", "title": "Deviation, its rank correlation, and sparsity by layer (figures 7, 8)",
         "rows": [_layer(lines, layer) for layer in layers]},
        {"name": "attention-deviation", "title": "Attention deviation against the recompute ratio (figure 6)",
         "rows": [_ratio(lines, str(ratio)) for ratio in RATIOS]},
    ]  # fmt: skip


def _layer(lines: Sequence[Mapping[str, Any]], layer: int) -> dict[str, Any]:
    ranks = [line["rank_correlation"][layer] for line in lines if line["rank_correlation"][layer] is not None]
    own = [line["deviation"][layer] for line in lines]
    return {
        "layer": layer,
        "deviation": statistics.fmean(own),
        "deviation_interval": interval(own),
        "rank_correlation_with_the_layer_before": statistics.fmean(ranks) if ranks else None,
        "rank_correlation_interval": interval(ranks) if ranks else None,
        "sparsity": statistics.fmean(line["sparsity"][layer] for line in lines),
        "n": len(lines),
    }


def _ratio(lines: Sequence[Mapping[str, Any]], ratio: str) -> dict[str, Any]:
    own = [line["attention"][ratio] for line in lines]
    mean = statistics.fmean(own)
    return {"ratio": float(ratio), "attention_deviation": mean, "interval": interval(own), "n": len(own)}
