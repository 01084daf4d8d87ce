# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Run every class of faults, look at the process after each, and write the report."""

import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_blend import plugins
from hf_blend.version import __version__

from .base import FaultClass, Outcome

__all__ = ["COUNTS", "run_faults"]

KIND = "evaluation.faults"
COUNTS = ("wrong_kv", "torn", "lost", "hangs")


def run_faults(
    faults: int,
    kills: int,
    seed: int,
    output: Path,
    tell: Callable[[str], None],
    after: Callable[[], dict[str, int]],
    earlier: Sequence[Path] = (),
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """Inject at least so many faults and kills.

    Args:
        faults: not counting kills; 0 leaves out the classes that do not kill.
        kills: processes killed; 0 leaves out the classes that kill.
        seed: of everything that is drawn.
        output: the report, written after each class.
        tell: is told of the progress.
        after: looks at the process after each class: name → how often it found something wrong.
        earlier: reports of other runs, whose classes are taken into this one.
        only: names of classes; none is all of them.

    Returns:
        The report.
    """
    torch.set_num_threads(1)
    logging.getLogger("hf_blend").setLevel(logging.CRITICAL)
    began_s = time.monotonic()
    reports = [json.loads(path.read_text("utf-8")) for path in earlier]
    classes: dict[str, dict] = {name: row for one in reports for name, row in one["classes"].items()}
    seeds = sorted({seed, *(other for one in reports for other in one["seeds"])})
    report: dict[str, Any] = {}
    kinds: dict[str, Any] = {name: plugins.load(KIND, name) for name in plugins.describe(KIND)}
    wanted = {name: kinds[name] for name in only or kinds if (kills if kinds[name].kill_share else faults)}
    for name, kind in sorted(wanted.items(), key=lambda item: -item[1].kill_share):
        outcome = _run_class(kind, name, faults, kills, seed)
        classes[name] = outcome | {"after": after()}
        complete = classes.keys() == kinds.keys()
        report = _report(classes, seeds, time.monotonic() - began_s, complete=complete)
        output.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
        tell(f"{name}: {outcome['faults']} faults, {outcome['seconds']} s, " + _bad(classes[name]))
    return report


def _run_class(kind: type[FaultClass], name: str, faults: int, kills: int, seed: int) -> dict[str, Any]:
    count = max(1, round(kills * kind.kill_share if kind.kill_share else faults * kind.share))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "store"
        place.mkdir()
        outcome: Outcome = kind(place, seed + sum(name.encode())).run(count)
    return outcome.as_dict() | {"seconds": round(time.monotonic() - began_s, 1)}


def _report(classes: dict[str, dict], seeds: list[int], seconds: float, *, complete: bool) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(row[name] for row in classes.values())

    checks = [row["after"] for row in classes.values()]
    return {
        **{name: total(name) for name in ("faults", "kills", *COUNTS)},
        "after": {name: sum(check[name] for check in checks) for name in checks[0]},
        "seeds": seeds,
        "seconds": round(seconds),
        "classes": classes,
        "complete": complete,
        "versions": {"hf_blend": __version__, "torch": torch.__version__},
    }


def _bad(row: dict[str, Any]) -> str:
    found = {name: row[name] for name in COUNTS if row[name]} | {
        name: count for name, count in row["after"].items() if count and name != "checked"
    }
    return f"FOUND {found}" if found else "nothing wrong"
