# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the first request of a prompt costs, with nothing stored, beside a full prefill and the second request.

    python benchmarks/first_request.py --model smollm2 --rows hotpotqa_natural.jsonl --output first_request.json

The prompts are passages and a question of a file of JSON lines (`chunks`, `question`), in the model's chat template.
The three take turns in one process, each first request with a fresh store in memory, and what counts is CPU time of
all threads: other work on the machine moves it less than the clock. The very first request of a process, which also
finds out whether the model can be blended, is measured once, apart. So is the first one of a second process: what the
process before it found out is beside the chunks, which are on disk.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import load_model
from hf_blend.version import __version__

FEWEST = 8  # passages of a prompt, and how many rows of the file are looked at
MOST = 10
ROWS = 60


def choose(tokenizer: Any, path: Path, tokens: int) -> tuple[list[str], str]:
    """The passages and the question of the prompt whose length is nearest to what is asked for."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:ROWS]]
    lengths = [[len(tokenizer(text).input_ids) for text in row["chunks"]] for row in rows]
    pairs = [(at, count) for at in range(len(rows)) for count in range(FEWEST, MOST + 1)]
    at, count = min(pairs, key=lambda one: abs(sum(lengths[one[0]][: one[1]]) - tokens))
    row = rows[at]
    return row["chunks"][:count], row["question"]


@torch.no_grad()
def spent(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of a piece of work, and what it gives."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def asked(chunks: list[str], question: str) -> list[dict[str, str]]:
    """The messages of a prompt."""
    return [{"role": "user", "content": "\n\n".join([*chunks, question])}]


def full(model: Any, tokenizer: Any, chunks: list[str], question: str) -> None:
    """A stock prefill of the same prompt."""
    ids = tokenizer.apply_chat_template(
        asked(chunks, question), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model(**ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)


def request(model: Any, tokenizer: Any, chunks: list[str], question: str, store: ChunkStore) -> BlendCache:
    """One blended prefill with the default settings, from the messages to the first token's logits."""
    cache = BlendCache(model, store)
    inputs = cache.inputs_from_messages(tokenizer, asked(chunks, question), documents=chunks)
    model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


def compare(model: Any, tokenizer: Any, path: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure one prompt.

    Args:
        model: of transformers.
        tokenizer: its tokenizer, with a chat template.
        path: of the rows.
        tokens: length of the prompt, nearly.
        rounds: of each kind; medians count.

    Returns:
        The figures.
    """
    given = choose(tokenizer, path, tokens)
    found: dict[str, list[float]] = {}
    one: dict[str, Any] = {}
    for _ in range(rounds):
        with ChunkStore.open("memory://") as store:
            ways: dict[str, Callable[[], Any]] = {
                "full": lambda: full(model, tokenizer, *given),
                "first": lambda store=store: request(model, tokenizer, *given, store),
                "second": lambda store=store: request(model, tokenizer, *given, store),
            }
            for name, work in ways.items():
                took, one[name] = spent(work)
                found.setdefault(f"{name}_cpu_s", []).append(took)
        report = one["first"].report
        whole = report.compute_ms + report.store_ms + report.check_ms
        for name in ("compute_ms", "store_ms", "check_ms"):
            found.setdefault(name.replace("_ms", "_share_of_these"), []).append(getattr(report, name) / whole)
        for name in ("first", "second"):
            found.setdefault(f"{name}_over_full", []).append(found[f"{name}_cpu_s"][-1] / found["full_cpu_s"][-1])
    return {
        "tokens": report.prompt_tokens,
        "computed_chunks": report.computed_chunks,
        "rounds": rounds,
        **{name: statistics.median(values) for name, values in found.items()},
        "first_over_full_each": found["first_over_full"],
    }


def second_process(given: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """The first request of a second process over later ones of it; the chunks are stored."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", __file__, "--model", given.model, "--rows", given.rows, "--tokens", tokens]
        command += ["--rounds", given.rounds, "--threads", given.threads, "--store", folder]
        for _ in range(2):
            done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_process(given: argparse.Namespace, model: Any, tokenizer: Any, tokens: int) -> dict[str, Any]:
    """CPU seconds of the first request and of later ones of this process, over a store on disk."""
    chosen = choose(tokenizer, given.rows, tokens)
    spent(lambda: full(model, tokenizer, *chosen))
    with ChunkStore.open(given.store) as store:
        took = [spent(lambda: request(model, tokenizer, *chosen, store)) for _ in range(1 + given.rounds)]
    first_s, cache = took[0]
    later_s = statistics.median(seconds for seconds, _ in took[1:])
    return {
        "rows": given.rows.name,
        "tokens": cache.report.prompt_tokens,
        "computed_chunks": cache.report.computed_chunks,
        "first_cpu_s": first_s,
        "later_cpu_s": later_s,
        "first_over_later": first_s / later_s,
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with chunks and question")
    parser.add_argument("--tokens", type=int, nargs="+", default=[900, 2000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("first_request.json"))
    parser.add_argument("--store", help="measure the first requests of this process over a store, and print them")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, tokenizer = load_model(given.model)
    if given.store:
        print(json.dumps(in_process(given, model, tokenizer, given.tokens[0])))
        return
    chosen = choose(tokenizer, given.rows, given.tokens[0])
    spent(lambda: full(model, tokenizer, *chosen))  # a model that has run before
    full_s, _ = spent(lambda: full(model, tokenizer, *chosen))
    with ChunkStore.open("memory://") as store:
        process_s, cache = spent(lambda: request(model, tokenizer, *chosen, store))
    result = {
        "model": given.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "rows": given.rows.name,
        "machine": {
            "device": platform.processor() or "cpu",
            "threads": given.threads,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_blend": __version__,
        },
        "first_of_process": {
            "tokens": cache.report.prompt_tokens,
            "cpu_s": process_s,
            "over_full": process_s / full_s,
        },
        "second_process": [second_process(given, tokens) for tokens in given.tokens],
        "prompts": [compare(model, tokenizer, given.rows, tokens, given.rounds) for tokens in given.tokens],
    }
    for row in result["second_process"]:
        print(f"{row['tokens']} tokens: first of a second process / later {row['first_over_later']:.2f}")
    given.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
