# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Find the smallest recompute ratio that keeps full-prefill quality."""

from pathlib import Path
from typing import Annotated

import typer

from .options import SELECTOR, Device, Dtype, Selector, Unverified
from .output import Json, fail, say, show

__all__ = ["tune"]

ModelName = Annotated[str | None, typer.Argument(help="Hub id or path; the default is the bundled reference model.")]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL file with chunks, question and maybe answer; default: the bundled task.")
]
Keep = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of full-prefill quality that is to be kept.")]
Corrector = Annotated[str, typer.Option(help="What is done to tokens that are not recomputed.")]
Count = Annotated[int, typer.Option(min=1, help="Questions of the bundled task.")]
Seed = Annotated[int, typer.Option(help="Which questions of the bundled task.")]
StorePlace = Annotated[str, typer.Option("--store", help="Where chunks are kept.")]


def tune(
    model: ModelName = None,
    prompts: Prompts = None,
    keep: Keep = 0.98,
    selector: Selector = SELECTOR,
    corrector: Corrector = "none",
    count: Count = 100,
    seed: Seed = 2,
    store: StorePlace = "memory://",
    device: Device = "auto",
    dtype: Dtype = "auto",
    allow_unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Measure ratios until the smallest that keeps enough is found.

    Quality is exact match where the prompts have answers, else how often the first token is that of a full prefill.
    Exit code 1: no ratio keeps enough.

    Examples:
        hf-blend tune --count 8
        hf-blend tune --count 2 --keep 0.9 --selector kv-deviation:on=k --json
        hf-blend tune HuggingFaceTB/SmolLM2-135M-Instruct --prompts mine.jsonl  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import tuning
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.bundled import load_model

    sample = tuning.read_prompts(prompts) if prompts else tuning.bundled_prompts(count, seed, model)
    config = blend_config(selector, corrector=corrector, allow_unverified=allow_unverified)
    loaded, tokenizer = load_model(model, device, dtype)
    with ChunkStore.open(store) as opened:
        measure = tuning.Measure(loaded, tokenizer, sample, opened)
        told = None if json else lambda point: say(f"ratio {point.recompute_ratio:g} keeps {point.kept:.3f}")
        best, points = tuning.tune(measure, config, keep, tell=told)
    result = tuning.Tuning(best, points, "exact match" if measure.by_answer else "first token").to_dict()
    show(result if json else result["points"], as_json=json, header=True, title=f"share of {result['quality']} kept")
    if best is None:
        fail(f"no ratio up to {points[-1].recompute_ratio:g} keeps {keep:g} of full prefill. Lower --keep.")
    if not json:
        say(f"recompute_ratio={best.recompute_ratio:g} keeps {best.kept:.3f} at a charge of {best.charged_budget:.3f}")
