# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run the classes of faults in rounds.

Every round has each class in its share, so a run of any length is a sample of all.
"""

import gc
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .entries import Changing, Files
from .fault import FaultClass, Verdict
from .kills import CallKills, Races
from .tiers import FailingCalls, FaultyTierFaults, Remote
from .world import World

ROUND = 300
AFTER = 20  # rounds, after which what faults left behind is frozen
CLASSES: dict[str, type[FaultClass]] = {
    "files": Files,
    "changing-files": Changing,
    "remote": Remote,
    "failing-calls": FailingCalls,
    "faulty-tier": FaultyTierFaults,
    "races": Races,
    "call-kills": CallKills,
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


def _freeze() -> None:
    """Collecting what one fault leaves behind takes no time then."""
    gc.collect()
    gc.freeze()
