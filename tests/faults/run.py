# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run the classes of faults in rounds, look at the process now and then, and write the report.

Every round has each class in its share, so a run of any length is a sample of all.
"""

import gc
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore

from .changes import Changes
from .entries import Changing, Files
from .fault import BROKEN, FaultClass, Verdict
from .kills import CallKills, Demotions, Placements, Races
from .requests import Prefills
from .tiers import FailingCalls, FaultyTierFaults, Remote
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
AFTER = 20  # rounds between two looks at the process
CLASSES: dict[str, type[FaultClass]] = {
    "files": Files,
    "changing-files": Changing,
    "remote": Remote,
    "prefills": Prefills,
    "model-changes": Changes,
    "failing-calls": FailingCalls,
    "faulty-tier": FaultyTierFaults,
    "races": Races,
    "call-kills": CallKills,
    "demotions": Demotions,
    "placements": Placements,
}


class Run:
    """The classes, ready to inject; a context, at whose end its threads and folders are gone."""

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
            self.classes[name] = CLASSES[name](self.world, root / "classes" / name)
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
                self._current = name
                one.run(count, f"{self.seed} {number} {name}")
                if stop():
                    return

    def until(
        self, faults: int, kills: int, seconds: float, tell: Callable[[str], None] = lambda line: None
    ) -> dict[str, Any]:
        """Inject rounds until there are enough, or the time is over."""
        began_s, number, aftermath = time.monotonic(), 0, Aftermath(self.world)
        while True:
            self.round(number, kills / faults if faults else 0.0)
            number += 1
            injected = sum(one.outcome.faults - one.outcome.kills for one in self.classes.values())
            is_over = time.monotonic() - began_s > seconds or injected >= faults
            if number % AFTER and not is_over:
                continue
            for name, count in aftermath.check().items():
                self.after[name] += count
            report = self._report(number, time.monotonic() - began_s)
            tell(f"round {number}: {report['faults']} faults, {report['broken']} broken, {report['seconds']} s")
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

    def _report(self, rounds: int, seconds: float) -> dict[str, Any]:
        """What this run found."""
        classes = {name: one.outcome.as_dict() for name, one in self.classes.items()}
        counted = {name: sum(row[name] for row in classes.values()) for name in ("faults", "kills", *Verdict)}
        return {
            **counted,
            "broken": sum(counted[verdict] for verdict in BROKEN) + self.after["different"] + self.after["leaks"],
            "after": self.after,
            "classes": classes,
            "commit": _commit(),
            "rounds": rounds,
            "seconds": round(seconds),
            "seed": self.seed,
        }


def _freeze() -> None:
    """Collecting what one fault leaves behind takes no time then."""
    gc.collect()
    gc.freeze()


def _commit() -> str:
    """Of the checkout, with a mark where something was changed since; empty outside of one."""
    given: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": False}
    head = subprocess.run(["git", "rev-parse", "HEAD"], **given).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **given).stdout.strip()
    return f"{head}{'+' if changed else ''}"
