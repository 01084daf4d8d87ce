# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which selector, at which ratio, a model and a user's own prompts need: measured by KL divergence, without labels.

Full prefill answers each prompt greedily. A candidate prefills the same prompt from stored chunks, and the answer is
forced on it: the KL divergence of its next-token distributions from full prefill's, mean over the answer's first
tokens, is what it loses. What reuse of chunks behind BOS alone loses is the unit: 0 is full prefill, and reuse behind
the default text, which costs nothing, is a candidate as others are. Candidates are chosen among on one half of the
prompts; the figures of the choice come from the other half, which it has not seen.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.anatomy import bos_prefix
from hf_blend.recipes import SETTINGS

from .answering import FULL_REUSE, REUSE, blend_config, build_request, ids_of
from .asking import FORCED_TOKENS, Loss, Pipeline, Question
from .blending import variants
from .bundled import handbook_questions
from .rows import CHUNKS, QUESTION, read_rows
from .summary import interval, share_interval

SELECTORS = ("stored-importance", "expected-error", "ramp")
RATIOS = (0.05, 0.15, 0.3)
LEAVE = 0.35  # of the KL divergence of reuse behind BOS alone
LEAST_KL = 1e-6  # nats: where full reuse loses no more, there is nothing to repair
BUNDLED_PAGES = 6  # of the handbook, in one prompt
Watch = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Candidate:
    """A way to blend."""

    name: str
    config: BlendConfig


@dataclass(frozen=True)
class Point:
    """A candidate over several prompts."""

    candidate: str
    charged: float
    kl: float
    low: float
    high: float
    kl_first: float
    ttft_ratio: float
    ttft_low: float
    ttft_high: float
    n: int


@dataclass(frozen=True)
class Tuning:
    """The outcome."""

    choice: Point
    config: dict[str, Any]
    leaves_enough: bool
    leave: float
    reuse_kl: float
    points: list[Point]


def bundled_prompts(count: int, seed: int, tokenizer: Any) -> list[Question]:
    """Ask the questions of the bundled handbook in turn, each over some of its pages in an order that is drawn."""
    questions = handbook_questions()
    prompts = []
    for number in range(count):
        row = questions[number % len(questions)]
        pages = Random(f"{seed} {number}").sample(row["chunks"], BUNDLED_PAGES)
        prompts.append(Question(f"question {number + 1}", build_request(tokenizer, pages, row["question"], None)))
    return prompts


def read_prompts(path: Path, tokenizer: Any, limit: int | None = None, positions: int | None = None) -> list[Question]:
    """Read a sample from a file with one row per line; see `rows`."""
    prompts = []
    for row in read_rows(path, (CHUNKS, QUESTION))[:limit]:
        chunks = [chunk if chunk[-1].isspace() else f"{chunk}\n\n" for chunk in row[CHUNKS]]
        request = build_request(tokenizer, chunks, row[QUESTION], row.get("prefix"))
        if positions is not None:
            tokens = len(ids_of(tokenizer, request)) + FORCED_TOKENS
            if tokens > positions:
                raise PromptError(
                    f"row {row['id']!r} of {str(path)!r} has {tokens:,} tokens with its answer, expected at most the "
                    f"model's {positions:,}. Shorten it or leave it out."
                )
        prompts.append(Question(f"row {row['id']!r}", request))
    return prompts


def candidates(selectors: Sequence[str], ratios: Sequence[float], **settings: Any) -> list[Candidate]:
    """Every selector at every ratio."""
    rows = []
    for text in selectors:
        for name, ratio in variants(text, ratios):
            rows.append(Candidate(f"{name}@{ratio:g}", blend_config(name, recompute_ratio=ratio, **settings)))
    return rows


def reuse_behind_bos(model: Any, allow_unverified: bool = False) -> Candidate:
    """The unit: full reuse of chunks that are computed behind BOS alone."""
    config = replace(REUSE, chunk_prefix_ids=bos_prefix(model), allow_unverified=allow_unverified)
    return Candidate("full reuse, behind BOS alone", config)


def tune(
    pipeline: Pipeline,
    prompts: Sequence[Question],
    candidates: Sequence[Candidate],
    leave: float = LEAVE,
    *,
    unit: Candidate | None = None,
    seed: int = 0,
    watch: Watch = lambda items, _: items,
) -> Tuning:
    """Choose on one half of the prompts, and measure the choice on the other.

    What `unit` loses is 1; it is no candidate. Without it full reuse is.
    """
    if len(prompts) < 2:
        raise PromptError(f"got {len(prompts)} prompts, expected 2 or more: one half chooses, the other reports.")
    if not candidates:
        raise ConfigError(f"got {len(candidates)} candidates, expected 1 or more. Name a selector and a ratio.")
    shuffled = Random(seed).sample(list(prompts), len(prompts))
    middle = (len(prompts) + 1) // 2
    reuse = Candidate(FULL_REUSE.name, replace(REUSE, allow_unverified=candidates[0].config.allow_unverified))
    unit = unit or reuse

    # Choose
    compared = {candidate.name: candidate for candidate in (unit, reuse, *candidates)}
    losses = measure(pipeline, watch(shuffled[:middle], "prompts, choosing"), compared.values(), seed)
    points = [point_of(candidate.name, losses, unit.name) for candidate in (reuse, *candidates)]
    points.sort(key=lambda point: point.charged)
    best, leaves_enough = choose(points, leave)
    chosen = compared[best.candidate]

    # Measure the choice
    compared = {candidate.name: candidate for candidate in (unit, chosen)}
    losses = measure(pipeline, watch(shuffled[middle:], "prompts, reporting"), compared.values(), seed)
    return Tuning(
        point_of(chosen.name, losses, unit.name),
        {name: value for name, value in chosen.config.to_dict().items() if name in SETTINGS},
        leaves_enough,
        leave,
        statistics.fmean(loss.kl for loss in losses[unit.name]),
        points,
    )


def choose(points: Sequence[Point], leave: float) -> tuple[Point, bool]:
    """Find the cheapest candidate that leaves little enough of the unit's KL divergence, else the nearest."""
    enough = [point for point in points if point.kl <= leave]
    if enough:
        return min(enough, key=lambda point: point.charged), True
    return min(points, key=lambda point: point.kl), False


def gain_of(points: Sequence[Point]) -> str:
    """Say what recomputing gains: where reuse alone is enough, and what the cheapest smaller error costs."""
    reuse = next(point for point in points if point.charged == 0)
    less = [point for point in points if point.kl < reuse.low]  # beyond what these prompts can tell apart
    begin = f"Full reuse costs nothing and has an error of {reuse.kl:.2f} [{reuse.low:.2f}, {reuse.high:.2f}]"
    if not less:
        return f"{begin}. No rule that was tried has a smaller one that {reuse.n} prompts could tell apart."
    first = min(less, key=lambda point: point.charged)
    return f"{begin}. The cheapest with a smaller one is {first.candidate}: {first.kl:.2f} at {first.charged:.2f}."


def measure(
    pipeline: Pipeline, prompts: Iterable[Question], candidates: Iterable[Candidate], seed: int
) -> dict[str, list[Loss]]:
    """What candidates lose on prompts, by name; of each prompt in an order that is drawn."""
    listed = list(candidates)
    by_prefix = {candidate.config.chunk_prefix_ids: candidate.config for candidate in listed}
    losses: dict[str, list[Loss]] = {candidate.name: [] for candidate in listed}
    for prompt in prompts:
        for config in by_prefix.values():
            pipeline.store_chunks(prompt, config)
        full = pipeline.full(prompt)
        for candidate in Random(f"{seed} {prompt.name}").sample(listed, len(listed)):
            losses[candidate.name].append(pipeline.loss(prompt, full, candidate.config))
    return losses


def point_of(name: str, losses: dict[str, list[Loss]], unit: str) -> Point:
    """One candidate's figures, as shares of the unit's."""
    kl = [loss.kl for loss in losses[name]]
    unit_kl = [loss.kl for loss in losses[unit]]
    share = _share(kl, unit_kl)
    low, high = share_interval(kl, unit_kl) if share else (0.0, 0.0)
    ratios = [loss.ttft_ratio for loss in losses[name]]
    ttft_low, ttft_high = interval(ratios, of_median=True)
    return Point(
        candidate=name,
        charged=statistics.fmean(loss.charged for loss in losses[name]),
        kl=share,
        low=low,
        high=high,
        kl_first=_share([loss.kl_first for loss in losses[name]], [loss.kl_first for loss in losses[unit]]),
        ttft_ratio=statistics.median(ratios),
        ttft_low=ttft_low,
        ttft_high=ttft_high,
        n=len(kl),
    )


def _share(parts: Sequence[float], wholes: Sequence[float]) -> float:
    """Sum of the parts over that of the wholes; 0 where there is nothing to lose."""
    return sum(parts) / sum(wholes) if sum(wholes) > LEAST_KL * len(wholes) else 0.0
