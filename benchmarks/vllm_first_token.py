# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The first token of vLLM alone and with the connector, all chunks stored, and the memory of both.

    python benchmarks/vllm_first_token.py --model FOLDER --rows hotpotqa_natural.jsonl --output vllm.json

Needs the environment that `make test-vllm` makes. Each engine is a process of its own, and they take turns: a prompt
of about `--tokens` tokens, whose passages stand in another order in every round, is answered by one token of each.
vLLM's prefix cache is on in both. Counted are the clock and the CPU time of all threads, which other work on the
machine moves less.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RATIO = 0.15
WARM_UP_ROUNDS = 2


def child(job: dict[str, Any]) -> None:
    """Answer requests that come line by line, and say what each took."""
    sys.path.insert(0, str(ROOT / "tests" / "vllm"))
    import psutil
    from engine import answer, make_engine

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    engine = make_engine(job)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        cpu = time.process_time()
        (found,) = answer(engine, [json.loads(line)], new_tokens=1)
        took = {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "cached": found["cached"]}
        took["rss"] = psutil.Process().memory_info().rss
        print(json.dumps(took), file=out, flush=True)


class Engine:
    """A process with an engine."""

    def __init__(self, model: str, extra: dict[str, Any] | None) -> None:
        job = json.dumps({"model": model, "extra": extra, "caching": True})
        given = [sys.executable, "-P", __file__, "--child", job]
        self._process = subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._line() == "ready\n"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Let it answer a request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def passages(rows: Path, tokenizer: Any, tokens: int) -> tuple[list[list[int]], list[int]]:
    """Passages of so many tokens together, and a question."""
    found = list[list[int]]()
    given = [json.loads(line) for line in rows.read_text("utf-8").splitlines()[:20]]
    for text in dict.fromkeys(text for row in given for text in row["chunks"]):
        if sum(map(len, found)) < tokens:
            found.append(tokenizer.encode(f"{text}\n\n"))
    return found, tokenizer.encode(f"{given[0]['question']}<|im_end|>\n<|im_start|>assistant\n")


def interval(values: list[float]) -> list[float]:
    """A 95 % interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(4000))
    return [round(medians[100], 2), round(medians[-101], 2)]


def measure(model: str, rows: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Let both answer in turns."""
    from transformers import AutoTokenizer

    from hf_blend import BlendConfig
    from hf_blend.integrations.vllm import plan_salt

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = BlendConfig(recompute_ratio=RATIO)
    documents, question = passages(rows, tokenizer, tokens)
    draw = random.Random(0)
    took = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as store:
        alone = Engine(model, None)
        with_connector = Engine(model, {"store": store, "recompute_ratio": RATIO})
        for number in range(rounds + WARM_UP_ROUNDS):
            draw.shuffle(documents)
            ids = tokenizer.encode("<|im_start|>user\n")
            spans = []
            for document in documents:
                spans.append([len(ids), len(ids) + len(document)])
                ids = ids + document
            ids = ids + question
            named = {"ids": ids, "documents": spans, "salt": plan_salt(ids, spans, config)} if number else {"ids": ids}
            turns = {"alone": (alone, {"ids": ids}), "connector": (with_connector, named)}
            order = [*turns] if number % 2 else [*reversed(turns)]
            took.append({name: turns[name][0].answer(turns[name][1]) for name in order})
            print(number, took[-1], file=sys.stderr)
        alone.close()
        with_connector.close()
    took = took[WARM_UP_ROUNDS:]
    ratios = {kind: [one["alone"][kind] / one["connector"][kind] for one in took] for kind in ("s", "cpu_s")}
    medians = {name: statistics.median(one[name]["s"] for one in took) for name in ("alone", "connector")}
    return {
        "model": Path(model).name, "tokens": len(ids), "chunks": len(documents), "recompute_ratio": RATIO,
        "rounds": rounds, "first_token_s": {name: round(one, 3) for name, one in medians.items()},
        "times_as_fast": {kind: round(statistics.median(one), 2) for kind, one in ratios.items()},
        "interval_95": {kind: interval(one) for kind, one in ratios.items()},
        "rss_bytes": {name: took[-1][name]["rss"] for name in ("alone", "connector")},
        "memory_ratio": round(took[-1]["connector"]["rss"] / took[-1]["alone"]["rss"], 3),
        "took": took,
    }  # fmt: skip


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--model", help="a folder that vLLM loads, of SmolLM2's chat template")
    parser.add_argument("--rows", type=Path, help="JSON lines with chunks and a question")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    import torch
    import transformers
    import vllm

    found = measure(given.model, given.rows, given.tokens, given.rounds)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found |= {**versions, "threads": os.environ.get("OMP_NUM_THREADS", ""), "cpus": os.cpu_count()}
    found["machine"] = platform.machine()
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print({name: value for name, value in found.items() if name != "took"})


if __name__ == "__main__":
    main()
