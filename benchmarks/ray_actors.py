# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chunks a second that actors of Ray compute and store, and what is stored after one of them was killed.

    python benchmarks/ray_actors.py --chunks 5000 --actors 2 [--kill] --output ray.json

Needs `pip install "hf-blend[ray]"`. The chunks are drawn tokens and the model is a tiny one of a config: what is
measured is the machinery around computing. Each forward leaves a line, written by what computes and not by the store.
With `--kill` the actor that computed last is killed once half of the chunks are computed.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from hf_blend import ChunkStore
from hf_blend.integrations.ray import index_ray_dataset
from hf_blend.model import canary

TOKENS, BATCH_ROWS, SEED = 8, 250, 0
SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 2048,
}  # fmt: skip


def counted_model(path: str) -> tuple[Any, None]:
    """Make the model; each forward leaves a line: process, clock, CPU seconds so far, digests."""
    compute = getattr(canary.compute_chunks, "__wrapped__", canary.compute_chunks)

    @wraps(compute)
    def counting(model: Any, keys: Any, *given: Any, **more: Any) -> Any:
        chunks = compute(model, keys, *given, **more)
        said = [os.getpid(), time.time(), time.process_time(), *(key.digest for key in keys)]
        with open(path, "a") as file:
            file.write(" ".join(map(str, said)) + "\n")
        return chunks

    canary.compute_chunks = counting
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), None


def lines(path: str) -> list[list[str]]:
    """What forwards have left."""
    return [line.split() for line in open(path).read().splitlines()] if os.path.exists(path) else []


def kill_at(path: str, chunks: int, killed: list[str]) -> None:
    """Kill the actor that computed last once so many chunks are computed."""
    while sum(len(line) - 3 for line in lines(path)) < chunks:
        time.sleep(1)
    killed.append(lines(path)[-1][0])
    os.kill(int(killed[0]), signal.SIGKILL)


def measure(chunks: int, actors: int, kill: bool, folder: Path) -> dict[str, Any]:
    """Index drawn chunks, and count what was computed and what is stored."""
    import ray

    draw = partial(random.Random(SEED).choices, range(3, 120), k=TOKENS)
    rows: dict[tuple[int, ...], None] = {}
    while len(rows) < chunks:
        rows[tuple(draw())] = None
    path, location, killed = str(folder / "computed"), folder / "kv", list[str]()
    if kill:
        threading.Thread(target=kill_at, args=(path, chunks // 2, killed), daemon=True).start()
    data = ray.data.from_items([{"ids": list(row)} for row in rows], override_num_blocks=max(8, chunks // 5000))
    before, began_s = os.getloadavg()[0], time.time()
    found = index_ray_dataset(
        data, partial(counted_model, path), {"location": str(location), "durability": "none"}, column="ids",
        actors=actors, batch_rows=BATCH_ROWS,
    )  # fmt: skip
    took_s, said = time.time() - began_s, lines(path)
    computed = Counter(digest for line in said for digest in line[3:])
    last = {line[0]: line for line in said}
    under_way = {digest for process in killed for digest in last[process][3:]}
    clock = [float(line[1]) for line in said]
    first = {line[0]: line for line in reversed(said)}
    cpu_s = sum(float(last[one][2]) - float(first[one][2]) for one in last)
    behind_first = sum(computed.values()) - sum(len(line) - 3 for line in first.values())
    with ChunkStore.open(location, memory_bytes=0) as store:
        entries = len(store)
        damaged = sum(bool(one.reason) for one in store.check())
    return {
        "chunks": chunks,
        "actors": actors,
        "killed": len(killed),
        "processes": len(last),
        "seconds": round(took_s, 1),
        "chunks_s": round((sum(computed.values()) - len(said[0]) + 3) / (max(clock) - min(clock)), 1),
        "cpu_ms_a_chunk": round(1e3 * cpu_s / behind_first, 2),
        "states": dict(Counter(row["state"] for row in found)),
        "entries": entries,
        "damaged": damaged,
        "computed_twice": sum(times > 1 for times in computed.values()),
        "computed_twice_and_not_under_way": sum(t > 1 and one not in under_way for one, t in computed.items()),
        "load_average": [round(before, 1), round(os.getloadavg()[0], 1)],
    }


def main() -> None:
    """Measure once, and add the run to a file."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=5000)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # its default is 15: actors would get what others leave
    paths = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    with tempfile.TemporaryDirectory() as folder:
        run = measure(given.chunks, given.actors, given.kill, Path(folder))
    ray.shutdown()
    print(json.dumps(run))
    about = {
        "model": {"class": "LlamaForCausalLM", **SHAPE}, "chunk_tokens": TOKENS, "batch_rows": BATCH_ROWS,
        "seed": SEED, "cpus": os.cpu_count(), "ray": ray.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "runs": [],
    }  # fmt: skip
    kept = json.loads(given.output.read_text()) if given.output.exists() else about
    kept["runs"].append(run)
    given.output.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
