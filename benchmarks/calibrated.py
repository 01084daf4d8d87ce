# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether calibration finds the right rule: its choice on bundled prompts against what other prompts say.

    python benchmarks/calibrated.py run --model gemma3 --dtype bfloat16 --output gemma3.json
    python benchmarks/calibrated.py table gemma3.json smollm2.json

`run` calibrates a model as `hf_blend.calibrate` does, which knows nothing of measured families. `table` compares: of
the rules that were tried, and of full reuse, which leaves least on the prompts of `robust.json`, mean over its tasks,
and how much more the choice leaves there. No prompt there is one that calibrated. Where `robust.json` is new, `table`
alone compares again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import parted_models
import torch
from real_selectors import RESULTS, _commit
from robust import FAMILIES, PASSAGES

from hf_blend import ChunkStore
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.calibration import CHARGE, RULES, calibrate

REUSE = "none"  # the selector of full reuse
PROMISE = 1.15  # of the error of the best rule that was tried


def run(arguments: argparse.Namespace) -> None:
    """Calibrate a model, and write what was chosen of what."""
    model, tokenizer = load_model(parted_models.locate(arguments.model), "cpu", arguments.dtype)
    began = time.process_time()
    calibration = calibrate(model, tokenizer, ChunkStore.open("memory://"))
    row = {
        "model": arguments.model,
        "dtype": str(model.dtype)[6:],
        "choice": calibration.recipe.settings["selector"],
        "ratio": calibration.recipe.settings["recompute_ratio"],
        "cpu_s": round(time.process_time() - began),
        "reuse_nats": round(calibration.reuse_kl, 5),
        "points": [asdict(point) for point in calibration.points],
    }
    arguments.output.write_text(json.dumps(row), "utf-8")
    print(calibration.recipe.source)


def left(rows: Sequence[Mapping[str, Any]], model: str) -> dict[str, float]:
    """What each rule, and full reuse, leaves on a model's prompts of `robust.json`, mean over its tasks."""
    own = [row for row in rows if row["model"] == model and row["method"].endswith("@text")]
    shares: dict[str, list[float]] = {}
    for row in own:
        rule = row["method"].removesuffix("@text")
        if (rule == REUSE and row["target"] == 0) or (rule in RULES and row["target"] == CHARGE):
            shares.setdefault(rule, []).append(row["kl"])
    return {rule: round(statistics.fmean(values), 4) for rule, values in shares.items()}


def compared(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add what the choice and the best rule leave on other prompts; nothing is added where these were not measured."""
    shares = left(rows, row["model"])
    if not shares:
        return dict(row)
    best = min(shares, key=lambda rule: shares[rule])
    return {**row, "left": shares, "best": best, "of_best": round(shares[row["choice"]] / shares[best], 4)}


def table(arguments: argparse.Namespace) -> None:
    """Write the table."""
    robust = json.loads((RESULTS / "robust.json").read_text("utf-8"))["rows"]
    robust = [row for row in robust if row["chunks"] == PASSAGES]
    runs = json.loads(arguments.output.read_text("utf-8"))["rows"] if arguments.output.exists() else []
    runs += [json.loads(path.read_text("utf-8")) for path in arguments.runs]
    rows = [compared(run, robust) for run in {run["model"]: run for run in runs}.values()]
    settings = {"promise": PROMISE, "charge": CHARGE, "torch": torch.__version__, "commit": _commit()}
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    arguments.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")
    for row in rows:
        print(row["model"], row["choice"], "best", row.get("best"), "of best", row.get("of_best"), row["cpu_s"], "s")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("run")
    write = commands.add_parser("table")
    measure.add_argument("--model", choices=FAMILIES, required=True)
    measure.add_argument("--dtype", default="auto")
    measure.add_argument("--output", type=Path, required=True)
    measure.set_defaults(do=run)
    write.add_argument("runs", type=Path, nargs="*", help="files of `run`, beside those in the table")
    write.add_argument("--output", type=Path, default=RESULTS / "calibrated.json")
    write.set_defaults(do=table)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
