# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token and peak memory on a GPU: large shapes, long prompts, full prefill against blending.

    python benchmarks/gpu.py --output benchmarks/results/gpu.json
    python benchmarks/gpu.py --device cpu --shape tiny --tokens 512 1024 --rounds 1     # anywhere, to try it

Weights are random; speed does not depend on what they say. Every prompt is chunks of 512 tokens and a question of 64,
the chunks in host memory, so that blending pays for bringing them to the device. Full prefill and every ratio take
turns; the median counts. The result is written after each length, so that a failure of a larger one loses nothing.
"""

import argparse
import gc
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from hf_blend.evaluation.bench.shapes import SHAPES
from hf_blend.evaluation.bench.ttft import TtftPlan, machine, measure_ttft

SHAPE_NAMES = ("llama-3.1-8b", "mistral-7b")
TOKENS = (8192, 16384, 32768)
RATIOS = (0.15, 0.05)
BOS_TOKENS = 1


def measure(shape: str, tokens: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one shape with prompts of one length.

    Args:
        shape: name of a model shape.
        tokens: of the prompt, at most; as many whole chunks as fit.
        given: the command line.

    Returns:
        One row per ratio.
    """
    chunks = (tokens - given.question_tokens - BOS_TOKENS) // given.chunk_tokens
    plan = TtftPlan(
        shape,
        chunks,
        given.chunk_tokens,
        given.question_tokens,
        tuple(given.ratios),
        rounds=given.rounds,
        dtype=given.dtype,
        device=given.device,
    )
    found = measure_ttft(plan, progress=lambda line: print(f"{shape}, {tokens} tokens, {line}", file=sys.stderr))
    full = found["full"]
    return [
        {
            "shape": shape,
            "tokens": row["prompt_tokens"],
            "ratio": row["ratio"],
            "charged_budget": row["charged_budget"],
            "full_ttft_ms": full["ttft_ms"],
            "ttft_ms": row["ttft_ms"],
            "ttft_ratio": row["ttft_ms"] / full["ttft_ms"],
            "flop_bound": row["flop_bound"],
            "bound_share": row["bound_share"],
            "realign_ms": row["realign_ms"],
            "select_ms": row["select_ms"],
            "full_peak_bytes": full.get("peak_bytes"),
            "peak_bytes": row.get("peak_bytes"),
            "peak_ratio": row["peak_bytes"] / full["peak_bytes"] if "peak_bytes" in row else None,
        }
        for row in found["rows"]
    ]


def described(given: argparse.Namespace) -> dict[str, Any]:
    """Device and versions that the figures depend on."""
    known = machine(TtftPlan(device=given.device, dtype=given.dtype, rounds=given.rounds))
    known.pop("shape")
    if given.device.startswith("cuda"):
        known["device_bytes"] = torch.cuda.get_device_properties(given.device).total_memory
    return {**known, "cuda": torch.version.cuda, "chunk_tokens": given.chunk_tokens, "system": platform.platform()}


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, measure, and write.

    Args:
        arguments: those of the command line where left out.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPE_NAMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="lengths of the prompts, at most")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    given = parser.parse_args(arguments)
    shortest = given.chunk_tokens + given.question_tokens + BOS_TOKENS
    if min(given.tokens) < shortest:
        parser.error(f"--tokens has {min(given.tokens)}, but one chunk and the question are {shortest}")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device is {given.device}, but torch sees no GPU; try --device cpu --shape tiny")
    rows: list[dict[str, Any]] = []
    for shape in given.shape:
        for tokens in given.tokens:
            rows += measure(shape, tokens, given)
            given.output.write_text(json.dumps({"machine": described(given), "rows": rows}, indent=2) + "\n", "utf-8")
            gc.collect()
            if given.device.startswith("cuda"):
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
