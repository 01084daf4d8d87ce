# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a store of very many entries costs a process: time of its first lookup, memory, and what follows.

The entries are made up, but for the few that are looked up: files without content under names that chunks of drawn
tokens have, and the rows that an index has of them. Each figure is of a process of its own, which opens the store,
finds chunks in a prompt, reads them, finds them again until that gets no faster, counts all, and puts one more under a
cap. The system has the files in its cache.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_blend import ChunkStore, HfBlendError
from hf_blend.store import ChunkKey, ChunkKV
from hf_blend.store.index import Listed
from hf_blend.version import __version__

MODEL = "0" * 64
SINK = (1,)
REAL = 4
PAGE = 5000
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class LargeStorePlan:
    """What is measured."""

    entries: tuple[int, ...] = (1_000, 10_000, 100_000)
    chunk_tokens: int = 128
    prompt_tokens: int = 4096
    rounds: int = 3
    seed: int = 0
    finds: int = 60  # in a row
    folder: str = ""  # of a store that was made before, with the one number of entries that is given


def measure_large_store(plan: LargeStorePlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Make a store of each size, and look things up in processes of their own."""
    rows = []
    for entries in plan.entries:
        folder = Path(plan.folder or tempfile.mkdtemp(prefix="large-store-", dir=os.environ.get("TMPDIR")))
        try:
            if not plan.folder:
                make_store(folder, entries, plan)
                time.sleep(3)  # directories that changed a moment ago are listed again
            runs = [_asked(folder, plan) for _ in range(plan.rounds + 1)][1:]  # the first one lists what was made
        finally:
            if not plan.folder:
                shutil.rmtree(folder, ignore_errors=True)
        middle = {name: sorted(run[name] for run in runs)[len(runs) // 2] for name in runs[0]}
        rows.append({"entries": entries, **middle})
        if progress:
            progress(json.dumps(rows[-1]))
    about = {name: value for name, value in asdict(plan).items() if name not in ("entries", "folder")}
    return {"torch": torch.__version__, "hf_blend": __version__, "cpus": os.cpu_count(), **about, "rows": rows}


def make_store(folder: Path, entries: int, plan: LargeStorePlan) -> None:
    """Fill a folder with names and rows, and store a few real chunks among them."""
    random = np.random.default_rng(plan.seed + 1)
    with ChunkStore.open(folder, durability="none", memory_bytes=0) as store:
        for number in range(REAL):
            store.put(drawn(number, plan))
        for start in range(0, entries - REAL, PAGE):
            page = []
            for _ in range(min(PAGE, entries - REAL - start)):
                ids = random.integers(3, 32_000, plan.chunk_tokens)
                key = ChunkKey(MODEL, SINK, tuple(ids.tolist()))
                path = folder / "objects" / f"{store.name(key.digest)}.safetensors"
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
                page.append(Listed(key, 0, 1.0))
            store.index.add(page)


def drawn(number: int, plan: LargeStorePlan) -> ChunkKV:
    """A chunk of drawn tokens with one small layer."""
    ids = np.random.default_rng((plan.seed, number)).integers(3, 32_000, plan.chunk_tokens).tolist()
    states = (torch.full((1, plan.chunk_tokens, 2), float(number)),) * 2 if number <= REAL else ()
    return ChunkKV(ChunkKey(MODEL, SINK, tuple(ids)), (states,), (), (-1,))


def look_up(folder: Path, plan: LargeStorePlan) -> dict[str, Any]:
    """Do once what processes do, and say what it took."""
    prompt = np.random.default_rng((plan.seed, 1, 1)).integers(3, 32_000, plan.prompt_tokens).tolist()
    for number in range(REAL):
        prompt[number * 200 : number * 200 + plan.chunk_tokens] = drawn(number, plan).key.token_ids
    ChunkStore.open("memory://").put(drawn(0, plan))  # what a process imports is not what a store costs
    before = _held()
    took = {}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        began_s = time.perf_counter()
        found = act()
        took[f"{name}_s"] = time.perf_counter() - began_s
        return found

    store = timed("open", lambda: ChunkStore.open(folder, durability="none", memory_bytes=1 << 20))
    found = timed("first_find", lambda: store.find(MODEL, SINK, prompt))
    got = timed("first_get", lambda: [store.get(one.key) for one in found])
    if len(got) != REAL or any(chunk is None for chunk in got):
        raise HfBlendError(f"{len(found)} chunks of {REAL} were found.")
    took["first_lookup_s"] = took["open_s"] + took["first_find_s"] + took["first_get_s"]
    took["lookup_bytes"] = _held() - before
    timed("second_find", lambda: store.find(MODEL, SINK, prompt))
    for _ in range(plan.finds):
        timed("last_find", lambda: store.find(MODEL, SINK, prompt))
    took["warm_bytes"] = _held() - before
    took["entries_found"] = timed("count", lambda: len(store))
    timed("first_put", lambda: store.put(drawn(REAL, plan)))
    store.delete(drawn(REAL, plan).key)
    took["all_bytes"] = _held() - before
    took["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    store.close()
    return took


def _asked(folder: Path, plan: LargeStorePlan) -> dict[str, Any]:
    given = json.dumps([str(folder), asdict(plan)])
    done = subprocess.run([sys.executable, "-P", __file__, given], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HfBlendError(f"looking up ended with {done.stderr[-800:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _held() -> int:
    return next(int(line.split()[1]) << 10 for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))


if __name__ == "__main__":
    path, settings = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(look_up(Path(path), LargeStorePlan(**settings))) + "\n")
