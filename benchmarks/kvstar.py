# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KVStar with a draft that is no copy: `python benchmarks/kvstar.py --folder run`, behind reference_model/draft.py.

`run/target` continues prompts, `run/draft` proposes tokens; the answers are kept in `run/kvstar`, where a stopped
measurement resumes. The table goes to benchmarks/results/kvstar_draft.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_blend.evaluation.kvstar import kvstar
from hf_blend.evaluation.trial import Trial

RESULT = Path(__file__).resolve().parent / "results" / "kvstar_draft.json"
ABOUT = (
    "block_tokens", "drafted", "parameters", "draft_parameters", "layers", "draft_layers", "seed", "threads",
)  # fmt: skip
TABLES = ("decoding", "speculation", "control")


def table(result: dict[str, Any]) -> dict[str, Any]:
    """What is committed of a run: every way once, and how far selections overlap."""
    rows: dict[str, dict[str, Any]] = {}
    for figure in result["figures"]:
        if figure["name"] in TABLES:
            rows |= {row["way"]: row for row in figure["rows"]}
    overlap = next(figure["rows"] for figure in result["figures"] if figure["name"] == "overlap")
    about = {name: result["settings"][name] for name in ABOUT}
    return {**about, "torch": torch.__version__, "rows": list(rows.values()), "kvstar_overlap": overlap}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of reference_model/draft.py")
    parser.add_argument("--limit", type=int, default=120, help="questions")
    parser.add_argument("--small", action="store_true", help="one share of the blocks")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = Trial(("chain-links",), (str(options.folder / "target"),), limit=options.limit)
    made = kvstar(base, options.folder / "kvstar", is_small=options.small, draft=str(options.folder / "draft"))
    options.output.write_text(json.dumps(table(made), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
