# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run the classes of faults in rounds, look at the process now and then, and write the report.

Every round has each class in its share, so a run of any length is a sample of all, and a later run can go on where an
earlier one ended: a round is drawn from the seed and its number alone.
"""

import functools
import gc
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_blend import BlendCache, ChunkStore
from hf_blend.version import __version__

from .changes import Changes
from .entries import Changing, Files, Headers, ImageChunks, IndexDamage, Placed, Planted, Signed
from .fault import BROKEN, FaultClass, Verdict
from .kills import CallKills, Demotions, Placements, Races, RandomKills, Reorders, TracedKills
from .requests import Partial, PartialRequests, Prefills
from .states import Checkpoints, Sessions
from .tiers import DeadTier, FailingCalls, FaultyTierFaults, LostServer, Redis, Remote
from .world import World

PREFIX, QUESTION = [1, 3, 4, 5], list(range(80, 89))
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


ROUND = 300
_ADDED = ("classes", "after", "runs")
AFTER = 20  # rounds between two looks at the process
CLASSES: dict[str, type[FaultClass]] = {
    "files": Files,
    "changing-files": Changing,
    "planted": Planted,
    "headers": Headers,
    "signed": Signed,
    "partial": Partial,
    "partial-requests": PartialRequests,
    "placed": Placed,
    "image-chunks": ImageChunks,
    "checkpoints": Checkpoints,
    "sessions": Sessions,
    "remote": Remote,
    "redis": Redis,
    "prefills": Prefills,
    "model-changes": Changes,
    "index-damage": IndexDamage,
    "failing-calls": FailingCalls,
    "faulty-tier": FaultyTierFaults,
    "dead-tier": DeadTier,
    "lost-server": LostServer,
    "races": Races,
    "call-kills": CallKills,
    "random-kills": RandomKills,
    "traced-kills": TracedKills,
    "demotions": Demotions,
    "placements": Placements,
    "reorders": Reorders,
}


class Run:
    """The classes, ready to inject; a context, at whose end the servers that were started are gone."""

    def __init__(self, seed: int = 0, folder: Path | None = None, only: Sequence[str] = ()) -> None:
        self.seed = seed
        self._temporary = tempfile.TemporaryDirectory(
            dir=folder, prefix="hf_blend-faults-", ignore_cleanup_errors=True
        )
        root = Path(self._temporary.name)
        self.world = World(root)
        self.classes: dict[str, FaultClass] = {}
        for name in only or CLASSES:
            (root / "classes" / name).mkdir(parents=True)
            made = CLASSES[name](self.world, root / "classes" / name)
            if made.is_available:
                self.classes[name] = made
        self.seconds: dict[str, list[float]] = {name: [0.0, 0.0] for name in self.classes}
        self.after = {"checked": 0, "different": 0, "leaks": 0}
        self._current = ""
        threading.excepthook = self._died
        _freeze()

    def round(self, number: int, kills: float = 0.0, stop: Callable[[], bool] = lambda: False) -> None:
        """Inject one round."""
        if number % AFTER == 1:
            _freeze()
        shares = sum(one.share for one in self.classes.values()) or 1.0
        for name, one in self.classes.items():
            count = max(1, round(ROUND * one.share / shares)) if one.share else 0
            if one.kill_share:
                rate = ROUND * kills * one.kill_share
                count = int((number + 1) * rate) - int(number * rate)
            if count:
                self._current, wall_s, cpu_s = name, time.monotonic(), _cpu_s()
                one.run(count, f"{self.seed} {number} {name}")
                self.seconds[name][0] += time.monotonic() - wall_s
                self.seconds[name][1] += _cpu_s() - cpu_s
                if stop():
                    return

    def until(
        self,
        faults: int,
        kills: int,
        seconds: float,
        output: Path,
        resume: bool = False,
        tell: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Any]:
        """Inject rounds until there are enough, or the time is over."""
        earlier = [json.loads(output.read_text("utf-8"))] if resume and output.exists() else []
        known = [run for one in earlier for run in one["runs"] if run["seed"] == self.seed]
        began_s, first = time.monotonic(), max((run["first"] + run["rounds"] for run in known), default=0)
        aftermath, number = Aftermath(self.world), first
        done = sum(one["faults"] - one["kills"] for one in earlier)
        while True:
            self.round(number, kills / faults if faults else 0.0)
            number += 1
            injected = sum(one.outcome.faults - one.outcome.kills for one in self.classes.values())
            is_over = time.monotonic() - began_s > seconds or done + injected >= faults
            if (number - first) % AFTER and not is_over:
                continue
            for name, count in aftermath.check().items():
                self.after[name] += count
            mine = self._report(first, number - first, time.monotonic() - began_s)
            report = added(*earlier, mine)
            output.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
            tell(f"round {number}: {report['faults']} faults, {report['broken']} broken, {report['seconds']:.0f} s")
            if is_over:
                return report

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self.classes.values():
            one.close()
        threading.excepthook = threading.__excepthook__
        gc.unfreeze()
        self._temporary.cleanup()

    def _died(self, caught: threading.ExceptHookArgs) -> None:
        """A thread that ends by an exception is a crash of the class that runs."""
        if self._current:
            note = f"{caught.exc_type.__name__}: {caught.exc_value}"
            self.classes[self._current].note("in a thread", Verdict.CRASHED, note)

    def _report(self, first: int, rounds: int, seconds: float) -> dict[str, Any]:
        """What this run found, without what follows from it."""
        run = {"seed": self.seed, "first": first, "rounds": rounds, "seconds": round(seconds), "commit": _commit()}
        rows = {}
        for name, one in self.classes.items():
            wall_s, cpu_s = (round(value, 1) for value in self.seconds[name])
            rows[name] = {**one.outcome.as_dict(), "seconds": wall_s, "cpu_seconds": cpu_s}
        return {"classes": rows, "after": self.after, "runs": [run]}


def added(*reports: dict[str, Any]) -> dict[str, Any]:
    """Add up the reports of runs."""
    classes, after, runs = (functools.reduce(_sum, (one[name] for one in reports)) for name in _ADDED)
    counted = {name: sum(row[name] for row in classes.values()) for name in ("faults", "kills", *Verdict)}
    without = [row for name, row in classes.items() if not CLASSES[name].kill_share]
    injected, wall_s, cpu_s = (sum(row[name] for row in without) for name in ("faults", "seconds", "cpu_seconds"))
    return {
        **counted,
        "broken": sum(counted[verdict] for verdict in BROKEN) + after["different"] + after["leaks"],
        "prefills": sum(row["faults"] for name, row in classes.items() if CLASSES[name].is_prefill),
        "faults_per_second": round(injected / max(wall_s, 1e-3)),  # kills not among them
        "faults_per_cpu_second": round(injected / max(cpu_s, 1e-3)),
        "seconds": sum(run["seconds"] for run in runs),
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "processor": platform.machine()},
        "versions": {
            "hf_blend": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "left_out": sorted(CLASSES.keys() - classes.keys()),
        "classes": classes,
        "after": after,
        "runs": runs,
    }


def _sum(one: Any, other: Any) -> Any:
    """Add up two parts of reports: counts are added, examples joined."""
    if isinstance(one, dict) and isinstance(other, dict):
        names = [*one, *(name for name in other if name not in one)]
        return {name: _sum(one.get(name), other.get(name)) for name in names}
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, list):
        return [*one, *(item for item in other if item not in one)]
    return round(one + other, 1) if isinstance(one, float) else one + other


def _freeze() -> None:
    """Collecting what one fault leaves behind takes no time then."""
    gc.collect()
    gc.freeze()


def _cpu_s() -> float:
    return sum(os.times()[:4])


def _commit() -> str:
    """Of the checkout, with a mark where something was changed since; empty outside of one."""
    given: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    head = subprocess.run(["git", "rev-parse", "HEAD"], **given).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **given).stdout.strip()
    return f"{head}{'+' if changed else ''}"
