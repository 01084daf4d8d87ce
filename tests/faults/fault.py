# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a class of faults is given, and what it counts.

Whatever is injected, what a store hands out is the truth or nothing; what was acknowledged and not damaged since is
there; every call comes back, and none raises what is not documented.
"""

import contextlib
import random
import signal
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

from hf_blend.errors import HfBlendError
from hf_blend.store import ChunkKV, ChunkStore

from .world import World, is_same, take

BATCH = 25
HANG_S = 120  # of one batch, or of one kill and the look after it
EXAMPLES = 10  # of what went wrong, one for each kind and verdict, kept for each class


class Verdict(StrEnum):
    """What became of one fault."""

    RIGHT = "right"  # what was handed out is the truth
    MISS = "miss"  # nothing was handed out, or what was handed out was computed instead
    REFUSED = "refused"  # an error of hf_blend says what is the matter, and nothing was handed out
    WRONG = "wrong"  # something else than the truth was handed out, or stored where it will be
    LOST = "lost"  # what was acknowledged, and not damaged, is gone
    CRASHED = "crashed"  # somebody else's exception, or no answer at all


BROKEN = (Verdict.WRONG, Verdict.LOST, Verdict.CRASHED)


def judged(got: list[ChunkKV], computed: bool, expected: ChunkKV) -> Verdict:
    """What became of the fault that a chunk met which was taken."""
    if not all(is_same(one, expected) for one in got):
        return Verdict.WRONG
    return Verdict.MISS if computed or not got else Verdict.RIGHT


class Hang(BaseException):
    """A call did not come back. No OSError, as TimeoutError is: the store would take that for a fault of its tier."""


@dataclass
class Outcome:
    """Counts of one class."""

    faults: int = 0
    kills: int = 0
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    paths: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def verdicts(self) -> dict[str, int]:
        """Verdict → how often, over all kinds."""
        total: Counter[str] = Counter()
        for kind in self.kinds.values():
            total.update(kind)
        return {verdict.value: total[verdict] for verdict in Verdict}

    @property
    def broken(self) -> int:
        """How often a promise was broken."""
        verdicts = self.verdicts()
        return sum(verdicts[verdict] for verdict in BROKEN)

    def as_dict(self) -> dict[str, Any]:
        kinds = {name: dict(sorted(counts.items())) for name, counts in sorted(self.kinds.items())}
        counts = {"faults": self.faults, "kills": self.kills, **self.verdicts()}
        return {**counts, "kinds": kinds, "paths": dict(sorted(self.paths.items())), "examples": self.examples}


class FaultClass(ABC):
    """One kind of damage, done many times."""

    share: ClassVar[float] = 0.0
    kill_share: ClassVar[float] = 0.0

    def __init__(self, world: World, folder: Path) -> None:
        self.world = world
        self.folder = folder
        self.random = random.Random()
        self.outcome = Outcome()
        self.setup()

    def setup(self) -> None:  # noqa: B027 (may do nothing)
        """Prepare what all rounds need."""

    def close(self) -> None:  # noqa: B027 (may do nothing)
        """End what `setup` started."""

    @abstractmethod
    def inject(self, count: int) -> None:
        """Inject at least so many faults, or kills, and record each."""

    def run(self, count: int, seed: str) -> None:
        """Inject, with an alarm for whatever hangs."""
        self.random.seed(seed)
        expected = self.done + count
        while self.done < expected:
            before = self.done
            try:
                with _alarm():
                    self.inject(min(expected - before, BATCH))
            except Hang:
                self.record("hang", Verdict.CRASHED, traceback.format_exc())
            assert self.done > before, f"{type(self).__name__} injects nothing"

    @property
    def done(self) -> int:
        """How many of what is asked for were injected."""
        return self.outcome.kills if self.kill_share else self.outcome.faults

    def judge(self, kind: str, act: Callable[[], Verdict], *, may_refuse: bool = False) -> Verdict:
        """Look what becomes of one fault, and record it."""
        note = ""
        try:
            verdict = act()
        except HfBlendError as error:
            verdict = Verdict.REFUSED if may_refuse else Verdict.CRASHED
            note = traceback.format_exc() if verdict in BROKEN else str(error)
        except Exception:
            verdict = Verdict.CRASHED
            note = traceback.format_exc()
        self.record(kind, verdict, note)
        return verdict

    def expect(self, store: ChunkStore, chunk: ChunkKV) -> Verdict:
        """Ask for a chunk, whole or layer by layer; what comes must be exactly it."""
        return judged(*take(store, chunk, self.random.choice(("get", "stream")), self.random), chunk)

    def find(self, store: ChunkStore, chunk: ChunkKV) -> Verdict:
        """The same for a chunk that must be there."""
        verdict = self.expect(store, chunk)
        return Verdict.LOST if verdict is Verdict.MISS else verdict

    def record(self, kind: str, verdict: Verdict, note: str = "", count: int = 1) -> None:
        """Count faults of one kind."""
        self.outcome.faults += count
        self.note(kind, verdict, note, count)

    def note(self, kind: str, verdict: Verdict, note: str = "", count: int = 1) -> None:
        """Count what was found, without a fault of its own."""
        if not count:
            return
        self.outcome.kinds.setdefault(kind, Counter())[verdict.value] += count
        said = f"{kind}: {verdict.value}."
        known = [one for one in self.outcome.examples if one.startswith(said)]
        if verdict in BROKEN and not known and len(self.outcome.examples) < EXAMPLES:
            self.outcome.examples.append(f"{said} {note[-1500:]}".strip())


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
