# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Find the cheapest selector and ratio near enough to full prefill."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import REAL, Device, Dtype, Model, Place, Unverified
from .output import Json, fail, progress, say, show
from .reading import load

if TYPE_CHECKING:
    from hf_blend.evaluation.tuning import Tuning

__all__ = ["tune"]

PROMPTS_HELP = "JSONL file with chunks and question in each row; default: the bundled handbook."
Prompts = Annotated[Path | None, typer.Option(help=PROMPTS_HELP)]
Leave = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Largest error of the choice: 0 is full prefill, 1 reuse of lone chunks."),
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--selector", help="A method or a file, options or @RATIO behind it; may be repeated. Default: three."
    ),
]
Ratios = Annotated[
    list[float] | None, typer.Option("--ratio", help="For selectors without one; may be repeated. Default: three.")
]
Limit = Annotated[int, typer.Option(min=0, help="The first prompts; 0 is all of a file.")]
ENOUGH = 24  # prompts; fewer say little
Seed = Annotated[int, typer.Option(help="Of the halves, and of which pages of the handbook.")]


def tune(
    model: Model = REAL,
    prompts: Prompts = None,
    leave: Leave = 0.35,
    selector: Selectors = None,
    ratio: Ratios = None,
    limit: Limit = ENOUGH,
    seed: Seed = 2,
    store: Place = "memory://",
    device: Device = "auto",
    dtype: Dtype = "auto",
    allow_unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Choose a selector and a ratio on half of the prompts, and measure the choice on the other half.

    What is measured is an error: the KL divergence of the next tokens from full prefill's, over ten tokens of its
    answer. 0 is full prefill, 1 is reuse of chunks that were computed alone. The cheapest rule with an error of at
    most --leave is chosen, full reuse among them. With --store the choice is kept there: BlendCache(model, store)
    uses it. Exit code 1: no error is so small, and the smallest is shown, not kept.

    Examples:
        hf-blend tune --limit 4 --selector kv-deviation --ratio 0.3
        hf-blend tune --limit 4 --selector kv-deviation:on=k@0.15 --leave 0.9 --json
        hf-blend tune --store my-chunks  # slow
        hf-blend tune --model HuggingFaceTB/SmolLM2-135M-Instruct --prompts mine.jsonl  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import tuning
    from hf_blend.evaluation.asking import Pipeline
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.model.identity import fingerprint
    from hf_blend.recipes import Recipe

    def watch(items: Any, what: str) -> Any:
        return progress(items, what, quiet=json)

    is_stored = store != "memory://"
    candidates = tuning.candidates(
        selector or tuning.SELECTORS, ratio or tuning.RATIOS, allow_unverified=allow_unverified
    )
    source = open_model(model, device, dtype)
    if prompts:
        sample = tuning.read_prompts(prompts, source.tokenizer, limit or None, source.positions)
    else:
        sample = tuning.bundled_prompts(limit or ENOUGH, seed, source.tokenizer)
    if len(sample) < ENOUGH:
        say(f"{len(sample)} prompts say little: give {ENOUGH} or more.")
    loaded = load(source)
    with ChunkStore.open(store) as opened:
        pipeline = Pipeline(loaded, source.tokenizer, opened)
        unit = tuning.reuse_behind_bos(loaded, allow_unverified)
        tuned = tuning.tune(pipeline, sample, candidates, leave, unit=unit, seed=seed, watch=watch)
        is_kept = is_stored and tuned.leaves_enough
        if is_kept:
            recipe = Recipe(tuned.config, f"tuned on {len(sample)} prompts: {_summary(tuned)}")
            opened.recipes.put(fingerprint(loaded), recipe)
    if json:
        show({**asdict(tuned), "is_kept": is_kept}, as_json=True)
    else:
        title = f"error (kl) on {tuned.points[0].n} prompts: 0 is full prefill, 1 reuse of chunks computed alone"
        show([asdict(point) for point in tuned.points], header=True, title=title)
        show([asdict(tuned.choice)], header=True, title=f"the choice, on {tuned.choice.n} others")
        say(_summary(tuned))
        say(tuning.gain_of(tuned.points))
        if tuned.leaves_enough:
            where = f"Kept in {store}" if is_kept else "Not kept; with --store it is"
            say(f"{where}: BlendCache(model, store) takes it where no selector is named.")
    if not tuned.leaves_enough:
        fail(f"No error is at most {leave:g} on the choosing half; the smallest is shown. Raise --leave or --ratio.")
    if tuned.choice.kl > leave:
        say(f"On the other half the error is above {leave:g}: these prompts do not settle it. Give more of them.")


def _summary(tuned: "Tuning") -> str:
    best = tuned.choice
    return (
        f"{best.candidate} has an error of {best.kl:.2f} [{best.low:.2f}, {best.high:.2f}] at a cost of "
        f"{best.charged:.2f}; first token after {best.ttft_ratio:.2f} [{best.ttft_low:.2f}, {best.ttft_high:.2f}] of "
        f"full prefill's time. Measured on {best.n} prompts that had no say in the choice."
    )
