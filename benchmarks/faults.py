# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Inject faults and kills, and write what became of them; ends with an error if a promise was broken.

From the root of the checkout: `python -m benchmarks.faults --help`. The classes of faults are those of `tests.faults`.
"""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore
from tests.faults.fault import BROKEN, Verdict
from tests.faults.run import AFTER, CLASSES, Run
from tests.faults.world import World

PREFIX = [1, 3, 4, 5]
QUESTION = list(range(80, 89))
NEW_TOKENS = 4
RATIO = 0.3
PATIENCE_S = 5.0  # for threads that still wait for a server


class Aftermath:
    """One request, and what it was answered before anything was injected."""

    def __init__(self, world: World) -> None:
        self._model, self._chunks = world.model, [list(ids) for ids in world.chunks[1:4]]
        self._plain = self._generate(None)
        with ChunkStore.open("memory://") as store:
            self._blended = self._generate(store)
        self._before = _held()

    def check(self) -> dict[str, int]:
        """Generate plainly, and blended from a new store."""
        generations = [(self._generate(None), self._plain)]
        with ChunkStore.open("memory://") as store:
            generations += [(self._generate(store), self._blended) for _ in range(2)]
        different = sum(not got.equal(expected) for got, expected in generations)
        return {"checked": len(generations), "different": different, "leaks": self._leaks()}

    def _generate(self, store: ChunkStore | None) -> torch.Tensor:
        """Logits of every new token: `[tokens, vocabulary]`."""
        cache = BlendCache(self._model, store or ChunkStore.open("memory://"), recompute_ratio=RATIO)
        inputs = cache.inputs(None, prefix=PREFIX, chunks=self._chunks, question=QUESTION)
        settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False, "output_logits": True}
        past = {} if store is None else {"past_key_values": cache}
        output = self._model.generate(**inputs, **past, **settings, return_dict_in_generate=True)
        return torch.cat(output.logits)

    def _leaks(self) -> int:
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._model.modules())
        deadline_s = time.monotonic() + PATIENCE_S
        while any(now > before for now, before in zip(_held(), self._before, strict=True)):
            if time.monotonic() > deadline_s:
                return hooks + 1
            time.sleep(0.05)
        return hooks


def _held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def until(run: Run, faults: int, kills: int, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Inject rounds until there are enough, or the time is over."""
    began_s = time.monotonic()
    number = 0
    aftermath = Aftermath(run.world)
    after = {"checked": 0, "different": 0, "leaks": 0}
    while True:
        run.round(number, kills / faults if faults else 0.0)
        number += 1
        injected = sum(one.outcome.faults - one.outcome.kills for one in run.classes.values())
        is_over = time.monotonic() - began_s > seconds or injected >= faults
        if number % AFTER and not is_over:
            continue
        for name, count in aftermath.check().items():
            after[name] += count
        report = _report(run, after, number, time.monotonic() - began_s)
        tell(f"round {number}: {report['faults']} faults, {report['broken']} broken, {report['seconds']} s")
        if is_over:
            return report


def _report(run: Run, after: dict[str, int], rounds: int, seconds: float) -> dict[str, Any]:
    """What this run found."""
    classes = {name: one.outcome.as_dict() for name, one in run.classes.items()}
    counted = {name: sum(row[name] for row in classes.values()) for name in ("faults", "kills", *Verdict)}
    return {
        **counted,
        "broken": sum(counted[verdict] for verdict in BROKEN) + after["different"] + after["leaks"],
        "after": after,
        "classes": classes,
        "commit": _commit(),
        "rounds": rounds,
        "seconds": round(seconds),
        "seed": run.seed,
    }


def _commit() -> str:
    """Of the checkout, with a mark where something was changed since; empty outside of one."""
    given: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    head = subprocess.run(["git", "rev-parse", "HEAD"], **given).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **given).stdout.strip()
    return f"{head}{'+' if changed else ''}"


def main() -> int:
    """Read the command line, run, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=50_000, help="in all")
    parser.add_argument("--kills", type=int, default=1_000, help="in all; spread over the faults; 0 kills nothing")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this run")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn, with the number of the round")
    parser.add_argument("--output", type=Path, default=Path("faults.json"), help="the report")
    parser.add_argument("--folder", type=Path, help="where the stores are; the system's folder for temporary files")
    parser.add_argument(
        "--only", nargs="*", default=[], choices=list(CLASSES), metavar="CLASS", help=" ".join(CLASSES)
    )
    given = parser.parse_args()
    logging.getLogger("hf_blend").setLevel(logging.CRITICAL)  # each fault is told of

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    with Run(given.seed, given.folder, given.only) as run:
        report = until(run, given.faults, given.kills, given.seconds, tell)
    given.output.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    tell(f"{report['kills']} of the faults were kills: {report['broken'] or 'no'} promises broken")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
