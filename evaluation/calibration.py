# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which rule a model needs that nobody measured: found once, on bundled prompts, before any request.

Ten questions are asked over pages of the bundled handbook, about 500 tokens each. Full prefill answers, and each rule
is compared with it as `tuning` compares: by the KL divergence of the next tokens over its answer. The unit is what
reuse behind the default text leaves, which is what doing nothing costs. All rules are at the same charge.
"""

import statistics
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.model.fingerprint import fingerprint
from hf_blend.recipes import SETTINGS, Recipe, needs_question

from . import tuning
from .answering import FULL_REUSE, REUSE, build_request, ids_of
from .asking import FORCED_TOKENS, Pipeline, Question
from .bundled import handbook_pages

RULES = {"expected-error": 0.12, "ramp": 0.15, "query-attention": 0.12}  # at which ratio the first prompt tries each
CHARGE = 0.15
WORTH = 0.85  # of reuse's error: a rule that leaves more, and cannot be told from reuse, is not worth its charge
PAGES = tuning.BUNDLED_PAGES  # in a prompt, or as many as the model reads
FEWEST_PAGES = 2
QUESTIONS = (  # by the number of the page that answers
    (1, "Until which day of the year is Tarn Hut kept open?"),
    (2, "Which branch of the path is safe for children?"),
    (3, "What did Ines Calder work as before she came to the hut?"),
    (4, "What happens to beds that were booked but not taken in time?"),
    (5, "What does the kitchen make on Fridays?"),
    (6, "Which tap may guests drink from, and why not from the other?"),
    (7, "What does it mean when the red lamp over the stairs is lit?"),
    (8, "When should parties for the summit leave, and why?"),
    (10, "Until when may a booking be cancelled without charge?"),
    (12, "Who designed the present house, and when was it opened?"),
)
NOTICE = (
    f"Calibrating: {len(QUESTIONS)} full prefills of bundled prompts of about 500 tokens, and the blended ones of "
    f"{len(RULES)} rules beside them; once for this model."
)


@dataclass(frozen=True)
class Calibration:
    """What was chosen for a model, and of what.

    Attributes:
        recipe: the choice, as the store keeps it.
        points: full reuse, and each rule, with what it leaves of full reuse's error.
        reuse_kl: the error of full reuse, nats.
    """

    recipe: Recipe
    points: list[tuning.Point]
    reuse_kl: float


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    *,
    allow_unverified: bool = False,
    watch: tuning.Watch = lambda items, _: items,
) -> Calibration:
    """Choose what is recomputed for a model on ten bundled prompts, and keep it in the store.

    `BlendCache(model, store)` takes the choice from then on where no selector is named; the chunks of the bundled
    prompts do not enter the store. The choice is the rule that leaves the least error at a charge of 0.15, or to
    recompute nothing, where that rule leaves more than 0.85 of what full reuse leaves and cannot be told from it.

    Args:
        model: a causal language model of transformers.
        tokenizer: the model's tokenizer.
        store: where chunks are kept.
        allow_unverified: use a model that fails the self-test, with one warning.
        watch: is passed the prompts and what they are, and gives them back; for a bar.

    Returns:
        The choice, and what each rule left.

    Raises:
        UnsupportedModelError: the model cannot be blended.
        PromptError: the model reads too few tokens for two pages and a question, or gives no exact prefill.
    """
    with ChunkStore.open("memory://") as scratch:
        BlendCache(model, scratch, allow_unverified=allow_unverified)  # or refuses the model
        pipeline = Pipeline(model, tokenizer, scratch)
        prompts = bundled_prompts(model, tokenizer)
        reuse = replace(REUSE, allow_unverified=allow_unverified)
        candidates = [tuning.Candidate(FULL_REUSE.name, reuse)]
        pipeline.store_chunks(prompts[0], reuse)
        for name in RULES:
            candidates.append(tuning.Candidate(name, _at_charge(pipeline, prompts[0], name, allow_unverified)))
        losses = tuning.measure(pipeline, watch(prompts, "prompts, calibrating"), candidates, seed=0)
    points = {name: tuning.point_of(name, losses, FULL_REUSE.name) for name in losses}
    reuse_kl = statistics.fmean(loss.kl for loss in losses[FULL_REUSE.name])

    settings = {}
    for candidate in candidates:
        config = candidate.config.to_dict()
        settings[candidate.name] = {name: config[name] for name in SETTINGS}
    choice = choose(points, reuse_kl)
    blind = choose(points, reuse_kl, is_blind=True)
    recipe = Recipe(settings[choice], source_of(points, choice, reuse_kl), settings[blind])
    store.recipes.put(fingerprint(model), recipe)
    return Calibration(recipe, list(points.values()), reuse_kl)


def choose(points: dict[str, tuning.Point], reuse_kl: float, is_blind: bool = False) -> str:
    """Name the rule that leaves least, or full reuse; with `is_blind` of those alone that do not ask the question."""
    rules = [points[name] for name in RULES if not (is_blind and needs_question(name))]
    best = min(rules, key=lambda point: point.kl)
    is_worth = best.kl <= WORTH or best.high < 1
    return best.candidate if is_worth and reuse_kl > tuning.LEAST_KL else FULL_REUSE.name


def source_of(points: dict[str, tuning.Point], choice: str, reuse_kl: float) -> str:
    """Say what was chosen, and why."""
    begin = f"calibrated on {len(QUESTIONS)} bundled prompts: {choice} "
    if choice == FULL_REUSE.name:
        least = min((points[name] for name in RULES), key=lambda point: point.kl)
        return f"{begin}({reuse_kl:.3f} nats), of which {least.candidate} leaves {_left(least)}"
    return f"{begin}leaves {_left(points[choice])} of full reuse's error at a charge of {points[choice].charged:.2f}"


def line_of(point: tuning.Point) -> str:
    """Say of a rule that was tried: its charge, what it left, its interval, its time."""
    return (
        f"{point.candidate}: charge {point.charged:.2f}, leaves {_left(point)} of full reuse's error, first token "
        f"after {point.ttft_ratio:.2f} of full prefill's time"
    )


def _left(point: tuning.Point) -> str:
    return f"{point.kl:.2f} [{point.low:.2f}, {point.high:.2f}]"


def bundled_prompts(model: nn.Module, tokenizer: Any) -> list[Question]:
    """Ask each question over the page that answers it and others, in an order that is drawn once for all models."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    prompts = []
    for number, text in QUESTIONS:
        for count in range(PAGES, FEWEST_PAGES - 1, -1):
            request = build_request(tokenizer, _drawn_pages(number, count), text, None)
            tokens = len(ids_of(tokenizer, request)) + FORCED_TOKENS
            if not isinstance(most, int) or tokens <= most:
                break
        else:
            raise PromptError(
                f"the model reads {most:,} tokens, but {FEWEST_PAGES} bundled pages, a question and its answer have "
                f"{tokens:,}. Tune it on shorter prompts of yours: hf-blend tune --prompts."
            )
        prompts.append(Question(f"bundled prompt {number}", request))
    return prompts


def _drawn_pages(number: int, count: int) -> list[str]:
    """A page of the handbook and others, in an order that its number draws."""
    pages = list(handbook_pages().values())
    answering = pages.pop(number - 1)
    others = Random(number).sample(pages, PAGES - 1)
    return Random(number).sample([answering, *others[: count - 1]], count)


def _at_charge(pipeline: Pipeline, prompt: Question, selector: str, allow_unverified: bool) -> BlendConfig:
    """Set the ratio of a selector so that a prompt is charged `CHARGE`; both grow nearly by as much."""
    config = BlendConfig(RULES[selector], selector, allow_unverified=allow_unverified)
    report = pipeline.answer(prompt.request, config, 1).report
    charged = report.charged_budget if report else CHARGE
    return replace(config, recompute_ratio=round(max(0.01, config.recompute_ratio + CHARGE - charged), 3))
