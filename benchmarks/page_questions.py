# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How often full prefill, full reuse and blending answer rightly on the page of `hf-blend demo`.

    python benchmarks/page_questions.py --output benchmarks/results/page_questions.json

The 60 questions of `hf_blend/bundled/handbook/page_questions.json`, five a page, were written before any was asked.
Each is asked as the page asks it: all twelve documents, the default rule and charge. An answer is right if it contains
the expected words. `opening` lists the questions on which full prefill and blending are right and full reuse is wrong;
`against` those on which full prefill and full reuse are right and blending is wrong.
"""

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_blend import ChunkStore, plugins
from hf_blend.evaluation.answering import FULL_PREFILL, FULL_REUSE, Method
from hf_blend.evaluation.asking import Pipeline
from hf_blend.evaluation.bundled import REAL
from hf_blend.evaluation.demo.model_cache import Loaded, ModelCache
from hf_blend.evaluation.demo.request import DemoRequest, handbook, page_questions, prepare
from hf_blend.evaluation.demo.visitors import Limits
from hf_blend.version import __version__

METHODS = (FULL_PREFILL, FULL_REUSE, Method("blend", DemoRequest("", "").config()))


def ask_all(loaded: Loaded, limits: Limits) -> list[dict[str, Any]]:
    """Ask every question three ways; by method the answer, whether it is right, and the time to its first token."""
    rule, rows = plugins.load("evaluation.scores", "containment")(), []
    with ChunkStore.open("memory://") as store:
        pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
        for question, answers in page_questions().items():
            prompt = prepare(loaded, DemoRequest(handbook(), question), limits)
            pipeline.answer(prompt.request, METHODS[-1].config, 1)  # stores what is missing, as the page does
            row: dict[str, Any] = {"question": question, "expected": list(answers)}
            for method in METHODS:
                reply = pipeline.ask(prompt, method, limits.new_tokens).row
                is_right = bool(rule.best(reply["answer"], answers))
                row[method.name] = {name: reply[name] for name in ("answer", "ttft_ms", "charged_budget")}
                row[method.name]["is_right"] = is_right
            rows.append(row)
            print(question, *(row[method.name]["is_right"] for method in METHODS), flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count right answers, and name the questions on which the methods part."""

    def where(*pattern: bool) -> list[str]:
        return [
            row["question"] for row in rows if tuple(row[method.name]["is_right"] for method in METHODS) == pattern
        ]

    return {
        "questions": len(rows),
        "right": {method.name: sum(row[method.name]["is_right"] for row in rows) for method in METHODS},
        "same_words": {
            method.name: sum(row[method.name]["answer"] == row[FULL_PREFILL.name]["answer"] for row in rows)
            for method in METHODS
        },
        "median_ttft_ms": {
            method.name: statistics.median(row[method.name]["ttft_ms"] for row in rows) for method in METHODS
        },
        "charged_budget": statistics.median(row["blend"]["charged_budget"] for row in rows),
        "opening": where(True, False, True),
        "against": where(True, True, False),
        "both_wrong": where(True, False, False),
    }


def main() -> None:
    """Ask and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--output", type=Path, default=Path("page_questions.json"))
    arguments = parser.parse_args()
    limits = Limits()
    rows = ask_all(ModelCache(device="cpu").take(arguments.model), limits)
    document = {
        "model": arguments.model,
        "new_tokens": limits.new_tokens,
        "config": METHODS[-1].config.to_dict() if METHODS[-1].config else None,
        "machine": {
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_blend": __version__,
        },
        **summary(rows),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
