# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What verifying costs: entries read and verified, beside plain reads of the same bytes into the same kind of buffer.

Reads take turns, file by file. Cold: the kernel is told to forget a file before it is read. Warm: it was read just
before. A put is measured with full durability: the file and its folder are on the disk when it returns.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_blend import ChunkStore, plugins
from hf_blend.store import ChunkKey, ChunkKV
from hf_blend.store.entry import EntryReader

MB = 1e6


@dataclass(frozen=True)
class StorePlan:
    """What is measured."""

    entries: int = 8
    tokens: int = 512
    layers: int = 30
    kv_heads: int = 3
    rounds: int = 5
    small_entries: int = 10_000
    folder: Path | None = None


def measure_store(plan: StorePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Put, read and open."""
    tell = progress or (lambda text: None)
    with TemporaryDirectory(dir=plan.folder) as folder:
        tell("putting")
        keys, put_mb_s = _put(plan, Path(folder) / "large")
        tell("reading warm")
        warm = _read(plan, Path(folder) / "large", keys, cold=False)
        tell("reading cold")
        cold = _read(plan, Path(folder) / "large", keys, cold=True)
        tell(f"opening {plan.small_entries} entries")
        open_s = _open(plan, Path(folder) / "small")
    return {
        "plan": {**vars(plan), "folder": None},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "warm": warm,
        "cold": cold,
        "verify_share_of_load": 1 - cold["share_of_raw_read"],
        "put_mb_s": put_mb_s,
        "open_s": open_s,
        "open_entries": plan.small_entries,
    }


def _chunk(number: int, tokens: int, layers: int, heads: int, width: int = 64) -> ChunkKV:
    generator = torch.Generator().manual_seed(number)
    states = [torch.randn(heads, tokens, width, generator=generator) for _ in range(2 * layers)]
    table = (torch.zeros(tokens, width), torch.zeros(tokens, width))
    ids = [int(one) for one in torch.randint(1 << 20, (tokens,), generator=generator)]
    key = ChunkKey("0" * 64, (1,), (number, *ids[1:]))
    return ChunkKV(key, tuple(zip(states[::2], states[1::2], strict=True)), (table,), (0,) * layers)


def _put(plan: StorePlan, root: Path) -> tuple[list[ChunkKey], float]:
    keys = []
    rates = []
    with ChunkStore.open(root, memory_bytes=0) as store:
        for number in range(plan.entries):
            chunk = _chunk(number, plan.tokens, plan.layers, plan.kv_heads)
            started = time.perf_counter()
            store.put(chunk)
            rates.append(chunk.nbytes / MB / (time.perf_counter() - started))
            keys.append(chunk.key)
    return keys, statistics.median(rates)


def _read(plan: StorePlan, root: Path, keys: list[ChunkKey], cold: bool) -> dict[str, float]:
    tier = plugins.load("store.tiers", "disk")(root)
    paths = {path.stem: path for path in root.rglob("*.safetensors")}
    rates: dict[str, list[float]] = {"read": [], "raw": []}
    for _ in range(plan.rounds):
        for key in keys:
            path = paths[key.digest]
            for way in ("raw", "read"):
                forget_file(path) if cold else path.read_bytes()
                started = time.perf_counter()
                nbytes = _raw(path) if way == "raw" else _verified(tier, path, key)
                rates[way].append(nbytes / MB / (time.perf_counter() - started))
    read, raw = (statistics.median(rates[way]) for way in ("read", "raw"))
    return {"read_mb_s": read, "raw_mb_s": raw, "share_of_raw_read": read / raw}


def _raw(path: Path) -> int:
    buffer = torch.empty(path.stat().st_size, dtype=torch.uint8)
    with path.open("rb", buffering=0) as file:
        return file.readinto(buffer.numpy())


def _verified(tier: Any, path: Path, key: ChunkKey) -> int:
    source = tier.open("/".join(path.with_suffix("").parts[-2:]))
    EntryReader(source, key).read()
    nbytes: int = source.stat.nbytes
    source.close()
    return nbytes


def _open(plan: StorePlan, root: Path) -> float:
    with ChunkStore.open(root, memory_bytes=0, durability="none") as store:
        for number in range(plan.small_entries):
            store.put(_chunk(number, 4, 1, 1, 8))
    times = []
    for _ in range(plan.rounds):
        started = time.perf_counter()
        with ChunkStore.open(root, memory_bytes=0) as store:
            count = len(store)
        times.append(time.perf_counter() - started)
    return statistics.median(times) if count == plan.small_entries else float("nan")


def forget(folder: Path) -> None:
    """Tell the kernel to drop the pages of every entry below a folder."""
    for path in folder.rglob("*.safetensors"):
        forget_file(path)


def forget_file(path: Path) -> None:
    """Tell the kernel to drop a file's pages; those that were not written yet are written first."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
