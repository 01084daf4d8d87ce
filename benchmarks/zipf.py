# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Zipf traffic on stores whose caps are a tenth of the corpus: are caps kept, does memory grow, what is hit?

    python benchmarks/zipf.py --seconds 3600 --output benchmarks/results/zipf.json

Every eviction policy gets the same requests in turn. A chunk that is missed is made anew and stored; one hit in twenty
is compared bit for bit with what was stored. Requests are paced by sleeping, so that little of a core is used.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from hf_blend import plugins
from hf_blend.store import ChunkKey, ChunkKV, ChunkStore

CHUNKS = 2000
TOKENS = 64
CHECK_EVERY = 20
SAMPLE_EVERY_S = 10.0


def make(number: int) -> ChunkKV:
    """The chunk of a number: two layers of two heads of width 16, always the same bits."""
    random = torch.Generator().manual_seed(number)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(2, TOKENS, 16, generator=random), torch.randn(2, TOKENS, 16, generator=random)

    return ChunkKV(ChunkKey("ab" * 32, (1,), (number, *range(1, TOKENS))), (pair(), pair()), (), (-1, -1))


class Traffic:
    """One policy under load.

    Args:
        policy: its name.
        folder: of its store.
        shares: of important tokens, by chunk.
    """

    def __init__(self, policy: str, folder: Path, shares: np.ndarray) -> None:
        self.chunk_bytes = make(0).nbytes
        self.entry_bytes = self._entry_bytes(folder / "probe")
        self.caps = {"memory": CHUNKS * self.chunk_bytes // 10, "disk": CHUNKS * self.entry_bytes // 10}
        self.store = ChunkStore.open(
            folder / policy,
            memory_bytes=self.caps["memory"],
            disk_bytes=self.caps["disk"],
            eviction=policy,
            durability="none",
        )
        self.shares = shares
        self.requests = self.hits = self.wrong = self.checked = 0
        self.important = self.important_hits = 0.0
        self.most_bytes = {"memory": 0, "disk": 0}

    def request(self, number: int) -> None:
        """Ask for a chunk, and store it if it is not there."""
        key = ChunkKey("ab" * 32, (1,), (number, *range(1, TOKENS)))
        found = self.store.get(key)
        self.requests += 1
        self.important += self.shares[number]
        if found is None:
            self.store.put(make(number))
            for tier, nbytes in self.store.stats()["bytes"].items():
                self.most_bytes[tier] = max(self.most_bytes[tier], nbytes)
        else:
            self.hits += 1
            self.important_hits += self.shares[number]
            if self.hits % CHECK_EVERY == 0:
                self._check(found, make(number))
        self.store.record_importance(key, float(self.shares[number]))

    def result(self) -> dict:
        """Rates, and how far each tier went beyond its cap in units of one chunk."""
        sizes = {"memory": self.chunk_bytes, "disk": self.entry_bytes}
        over = {tier: (self.most_bytes[tier] - cap) / sizes[tier] for tier, cap in self.caps.items()}
        return {
            "requests": self.requests,
            "hit_rate": round(self.hits / self.requests, 4),
            "important_hit_rate": round(self.important_hits / self.important, 4),
            "hits": self.store.stats()["hits"],
            "evicted": self.store.stats()["evicted"],
            "misses": self.store.stats()["misses"],
            "store_failures": self.store.stats()["store_failures"],
            "cap_bytes": self.caps,
            "most_bytes": self.most_bytes,
            "most_over_cap_chunks": {tier: round(value, 3) for tier, value in over.items()},
            "checked": self.checked,
            "wrong_kv": self.wrong,
        }

    def _check(self, found: ChunkKV, wanted: ChunkKV) -> None:
        pairs = zip(found.named_tensors(), wanted.named_tensors(), strict=True)
        self.wrong += not all(got.equal(tensor) for (_, got), (_, tensor) in pairs)
        self.checked += 1

    @staticmethod
    def _entry_bytes(folder: Path) -> int:
        with ChunkStore.open(folder, durability="none") as probe:
            probe.put(make(0))
            (entry,) = probe.entries()
            return entry.nbytes


def slope_mb_per_hour(samples: list[tuple[float, float]]) -> float:
    """Least-squares slope over the last five sixths of (seconds, bytes)."""
    seconds, nbytes = np.array(samples[len(samples) // 6 :]).T
    return float(np.polyfit(seconds, nbytes, 1)[0] * 3600 / 1e6) if len(seconds) > 2 else float("nan")


def run(seconds: float, rate: float, seed: int, folder: Path, output: Path) -> None:
    """Drive all policies and write the result, also on the way."""
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, CHUNKS + 1)
    popularity /= popularity.sum()
    shares = random.beta(1, 3, CHUNKS)
    traffics = {name: Traffic(name, folder, shares) for name in plugins.describe("store.eviction")}
    process, began_s = psutil.Process(), time.monotonic()
    samples: list[tuple[float, float]] = []
    draws = (random.choice(CHUNKS, 1000, p=popularity).tolist() for _ in itertools.count())
    numbers = itertools.chain.from_iterable(draws)
    while (passed_s := time.monotonic() - began_s) < seconds:
        number = next(numbers)
        for traffic in traffics.values():
            traffic.request(number)
        if passed_s >= SAMPLE_EVERY_S * len(samples):
            samples.append((passed_s, process.memory_info().rss))
            cpu_share = sum(process.cpu_times()[:2]) / max(passed_s, 1e-9)
            result = {
                "seconds": round(passed_s),
                "complete": False,
                "chunks": CHUNKS,
                "zipf_exponent": 1.0,
                "seed": seed,
                "rate_per_s": rate,
                "cpu_share": round(cpu_share, 3),
                "rss_mb": [round(rss / 1e6, 1) for _, rss in samples[:: max(1, len(samples) // 60)]],
                "rss_slope_mb_per_hour": slope_mb_per_hour(samples),
                "open_files": process.num_fds(),
                "threads": process.num_threads(),
                "policies": {name: traffic.result() for name, traffic in traffics.items()},
            }
            result["complete"] = passed_s >= seconds - 2 * SAMPLE_EVERY_S
            output.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
        time.sleep(1 / rate)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=float, default=25, help="requests per second to each policy, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("zipf.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(given.seconds, given.rate, given.seed, Path(folder), given.output)


if __name__ == "__main__":
    main()
