# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The first token of the stock `transformers serve`, and of the same server over a folder with our `custom_generate`.

    python benchmarks/transformers_serve.py --model smollm2 --data DIR --output transformers_serve.json

Both servers run side by side on one thread each and take turns: six chunks of some 540 tokens, in another order in
every round, with a question behind them, are answered by one token. The store has the chunks. Times are the clock's,
of whole requests; a ratio is the median, with the least and the most.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import parted_models
import transformers
from regime import FILES, read_prompts

from hf_blend import ChunkStore, load
from tests.servers import Server

ROOT = Path(__file__).resolve().parent.parent
SERVE = "from transformers.cli.transformers import main; main()"
EXAMPLE = ROOT / "examples" / "custom_generate" / "custom_generate"
ROUNDS, WARM_UP_ROUNDS = 7, 2


def asked(port: int, folder: str, text: str) -> float:
    """The seconds in which a server answers a text by one token."""
    body = {"model": folder, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 1}
    began = time.perf_counter()
    httpx.post(f"http://localhost:{port}/v1/chat/completions", json=body, timeout=600).raise_for_status()
    return time.perf_counter() - began


def measure(model: str, dtype: str, row: dict[str, Any]) -> dict[str, Any]:
    """Let both servers answer in turns."""
    took = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(HF_BLEND_HOME=f"{scratch}/home", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        servers = {}
        for name in ("stock", "blend"):
            folder = f"{scratch}/{name}/model"
            shutil.copytree(parted_models.locate(model), folder)
            if name == "blend":
                shutil.copytree(EXAMPLE, f"{folder}/custom_generate")
                with ChunkStore.open() as store:
                    stored = store.add(*load(folder, dtype=dtype), row["chunks"])
            words = ["serve", folder, "--trust-remote-code", "--device", "cpu", "--dtype", dtype, "--port"]
            command = [sys.executable, "-P", "-c", SERVE, *words]
            servers[folder] = Server(lambda port, words=command: [*words, str(port)], Path(scratch, name), 120)
        for number in range(ROUNDS + WARM_UP_ROUNDS):
            text = "\n\n".join([*random.Random(number).sample(row["chunks"], len(row["chunks"])), row["question"]])
            turns = servers if number % 2 else reversed(servers)
            took.append({Path(folder).parent.name: asked(servers[folder].port, folder, text) for folder in turns})
            print(number, took[-1])
        for server in servers.values():
            server.kill()
    ratios = sorted(one["stock"] / one["blend"] for one in took[WARM_UP_ROUNDS:])
    return {
        "model": model,
        "dtype": dtype,
        "chunk_tokens": sum(len(key.token_ids) for key in stored),
        "rounds": ROUNDS,
        "stock_s": round(statistics.median(one["stock"] for one in took[WARM_UP_ROUNDS:]), 3),
        "times_as_fast": [round(ratio, 2) for ratio in (statistics.median(ratios), ratios[0], ratios[-1])],
        "threads": 1,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="rows that it has stay")
    given = parser.parse_args()
    rows = json.loads(given.output.read_text("utf-8"))["rows"] if given.output.exists() else []
    rows.append(measure(given.model, given.dtype, read_prompts(given.data / FILES["musique"], 6)[0]))
    given.output.write_text(json.dumps({"rows": rows}, indent=1) + "\n", "utf-8")
    print(rows[-1])
