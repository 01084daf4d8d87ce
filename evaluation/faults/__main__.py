# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Inject faults and kills into stores; ends with an error if a promise was broken."""

import argparse
import sys
from pathlib import Path

from .run import COUNTS, run_faults


def main() -> int:
    """Read the command line, run, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m hf_blend.evaluation.faults", description=__doc__)
    parser.add_argument("--faults", type=int, default=50_000, help="besides those that kill; 0 injects none")
    parser.add_argument("--kills", type=int, default=1_000, help="0 kills nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("faults.json"), help="the report")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="reports to take into this one")
    parser.add_argument("--only", nargs="*", default=[], help="names of classes")
    given = parser.parse_args()

    def tell(line: str) -> None:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    from .aftermath import Aftermath

    counts = (given.faults, given.kills, given.seed)
    report = run_faults(*counts, given.output, tell, Aftermath().check, given.earlier, given.only)
    broken = {name: report[name] for name in COUNTS if report[name]}
    broken |= {name: report["after"][name] for name in ("different", "leaks") if report["after"][name]}
    summary = f"{report['faults']} faults, {report['kills']} of them kills, {report['seconds']} s"
    tell(f"{summary}: {broken or 'all promises kept'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
