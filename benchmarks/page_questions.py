# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How often full prefill, full reuse and blending answer rightly on the page of `hf-blend demo`.

    python benchmarks/page_questions.py --output benchmarks/results/page_questions.json

The 50 questions of `hf_blend/bundled/handbook/page_questions.json`, five for each of ten documents, were written
before any was asked. Each is asked as the page asks it: all twelve documents, the default rule and charge. An answer
is right if it contains the expected words. `opening` lists the questions on which full prefill and blending are right
and full reuse is wrong; `against` those on which full prefill and full reuse are right and blending is wrong.
"""

import argparse
import json
import platform
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
    """Ask every question three ways; by method whether the answer is right."""
    rule, rows = plugins.load("evaluation.scores", "containment")(), []
    with ChunkStore.open("memory://") as store:
        pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
        for question, answers in page_questions().items():
            prompt = prepare(loaded, DemoRequest(handbook(), question), limits)
            pipeline.answer(prompt.request, METHODS[-1].config, 1)  # stores what is missing, as the page does
            told = {method.name: pipeline.ask(prompt, method, limits.new_tokens).row["answer"] for method in METHODS}
            is_right = {name: bool(rule.best(answer, answers)) for name, answer in told.items()}
            print(question, *told.items(), flush=True)
            rows.append({"question": question, "expected": list(answers), "right": is_right})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count right answers, and name the questions on which the methods part."""

    def where(*pattern: bool) -> list[str]:
        return [row["question"] for row in rows if tuple(row["right"][method.name] for method in METHODS) == pattern]

    return {
        "right": {method.name: sum(row["right"][method.name] for row in rows) for method in METHODS},
        "opening": where(True, False, True),
        "against": where(True, True, False),
    }


def write(path: Path, model: str, rows: list[dict[str, Any]], new_tokens: int) -> None:
    """Write the counts with what they depend on."""
    config, machine = (
        METHODS[-1].config,
        {
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_blend": __version__,
        },
    )
    settings = {"model": model, "new_tokens": new_tokens, "config": config and config.to_dict(), "machine": machine}
    document = {**settings, **summary(rows), "rows": rows}
    path.write_text(json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def main() -> None:
    """Ask and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REAL)
    parser.add_argument("--output", type=Path, default=Path("page_questions.json"))
    arguments = parser.parse_args()
    limits = Limits()
    rows = ask_all(ModelCache(device="cpu").take(arguments.model), limits)
    write(arguments.output, arguments.model, rows, limits.new_tokens)


if __name__ == "__main__":
    main()
