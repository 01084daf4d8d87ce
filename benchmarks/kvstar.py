# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KVStar with a draft that is no copy: `python benchmarks/kvstar.py --folder run`, behind reference_model/draft.py.

`run/target` continues prompts, `run/draft` proposes tokens. Asked are the first held-out questions that the target
answers right, word for word, when it looks at everything: what other ways answer wrong, they lost. Answers are kept
in `run/kvstar`, where a stopped measurement resumes. The table goes to benchmarks/results/kvstar_draft.json.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_blend import plugins
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.kvstar import kvstar
from hf_blend.evaluation.trial import EvalConfig

RESULT = Path(__file__).resolve().parent / "results" / "kvstar_draft.json"
ABOUT = (
    "block_tokens", "drafted", "parameters", "draft_parameters", "layers", "draft_layers", "seed", "threads",
)  # fmt: skip
TABLES = ("decoding", "speculation", "control")
TASK, QUESTIONS = "chain-links", "questions.jsonl"


@torch.no_grad()
def choose(folder: Path, limit: int) -> dict[str, int]:
    """Write the first questions that the target answers right; returns how many, and of how many."""
    model, tokenizer = load_model(str(folder / "target"))
    task = plugins.load("evaluation.tasks", TASK)(tokenizer)
    kept, asked = [], 0
    for row in task.rows():
        sample, asked = task.sample(row), asked + 1
        answer = [*task.ids(row["answers"][0]), tokenizer.eos_token_id]
        prompt = [tokenizer.bos_token_id, *(token for chunk in sample.chunks for token in chunk), *sample.question]
        said = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        if said.tolist() == answer:
            kept.append(json.dumps(row) + "\n")
        if len(kept) == limit:
            break
    (folder / QUESTIONS).write_text("".join(kept), "utf-8")
    return {"chosen": len(kept), "of": asked}


def table(result: dict[str, Any], questions: dict[str, int]) -> dict[str, Any]:
    """What is committed of a run: every way once, and how far selections overlap."""
    rows: dict[str, dict[str, Any]] = {}
    for figure in result["figures"]:
        if figure["name"] in TABLES:
            rows |= {row["way"]: row for row in figure["rows"]}
    overlap = next(figure["rows"] for figure in result["figures"] if figure["name"] == "overlap")
    about = {**{name: result["settings"][name] for name in ABOUT}, "questions": questions, "torch": torch.__version__}
    return {**about, "rows": list(rows.values()), "kvstar_overlap": overlap}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of reference_model/draft.py")
    parser.add_argument("--limit", type=int, default=100, help="questions")
    parser.add_argument("--small", action="store_true", help="one share of the blocks")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    questions = choose(options.folder, options.limit)
    data = ((TASK, str(options.folder / QUESTIONS)),)
    base = EvalConfig((TASK,), (str(options.folder / "target"),), limit=options.limit, data=data)
    made = kvstar(base, options.folder / "kvstar", is_small=options.small, draft=str(options.folder / "draft"))
    options.output.write_text(json.dumps(table(made, questions), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
