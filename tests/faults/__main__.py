# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Inject faults and kills, and write what became of them; ends with an error if a promise was broken."""

import argparse
import json
import logging
import sys
from pathlib import Path

from .run import CLASSES, Run


def main() -> int:
    """Read the command line, run, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
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
        report = run.until(given.faults, given.kills, given.seconds, tell)
    given.output.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    tell(f"{report['kills']} of the faults were kills: {report['broken'] or 'no'} promises broken")
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
