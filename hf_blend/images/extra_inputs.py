# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this extension adds to the core: forwards that bring more than text, of which the first of each kind is tested.

The other checks have only text to show, so that forward is run twice beforehand: plainly, and blended with the plain
forward's own K and V as if they had been stored. With these any share of recomputed tokens gives what the plain
forward gives, so a position, a mask or an addition between the layers that blending misses shows as an error, wherever
the images stand. One such test counts for all forwards with these arguments, this dtype and this attention.
"""

import logging
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..model.cache_keyword import cache_argument, without_cache
from ..model.capture import Capture, capture_forward, distinct_tables
from ..model.checks import (
    FINE,
    LOGITS,
    CheckedModel,
    CheckResult,
    Use,
    allowed_of,
    check,
    ensure_passed,
    has_passed,
    kv_of,
    norm_error,
    token_errors,
)
from ..model.modality import has_features, other_inputs
from ..prefill.plan import PlacedChunk, Plan
from ..prefill.request import Request
from ..prompt.content import is_content
from ..store.chunk import ChunkKV

logger = logging.getLogger(__name__)

RATIO = 0.3  # of the chunks' tokens is recomputed: rows are left out, and others stand alone between them
COARSE_LOGITS_BOUND = 0.2  # in 16 bits one token sent to another expert shows in its logits
OTHER_INPUTS = Use(
    "other inputs",
    __name__,
    "{} cannot be blended",
    "Use full prefill for such prompts, or pass allow_unverified=True to blend them all the same.",
)


def can_blend(cache: BlendCache, request: Request) -> bool:
    """Whether it is known what each token of a forward stands for; if not, all of it is computed."""
    is_named = any(is_content(max(row, default=0)) for row in request.rows)
    marked = is_named or not all(map(cache.traits.placeholders.isdisjoint, request.rows))
    if not marked and has_features(request.arguments):
        logger.warning(
            "nothing is reused: %s came with a prompt in which no token is known to stand for it",
            ", ".join(request.others),
        )
        return False
    if request.past == 0:
        return True
    return has_passed(FirstForward(cache, request, is_named), OTHER_INPUTS)


def ensure_tested(cache: BlendCache, plan: Plan, request: Request) -> None:
    """Test the first forward of its kind beside itself."""
    of_images = any(placed.is_image for placed in plan.chunks)
    ensure_passed(FirstForward(cache, request, of_images, plan), OTHER_INPUTS, cache.config.allow_unverified)


class FirstForward(CheckedModel):
    """A model with a forward that brings more than text, for a cache."""

    def __init__(self, cache: BlendCache, request: Request, of_images: bool, plan: Any = None) -> None:
        """Take the forward; without a plan it cannot be run, but has a kind, which may have passed before."""
        super().__init__(cache.model)
        self._for, self._request, self._plan = cache, request, plan
        self.kind = other_inputs(request.arguments), of_images
        self.name = f"{self.name} with {', '.join(self.kind[0])}"

    def run(self) -> tuple[Plan, BlendCache, Tensor, Capture, Tensor]:
        """The forward twice: plan, cache and last logits of the blended; K and V and last logits of the plain."""
        arguments: dict[str, Any] = {**self._request.arguments, "return_dict": True}
        if "logits_to_keep" in signature(self.model.forward).parameters:
            arguments["logits_to_keep"] = 1
        true, output = capture_forward(self.model, arguments)
        sink = tuple(self._for.chunk_prefix_ids)
        cache = BlendCache(
            self.model, self._for.store, BlendConfig(RATIO, chunk_prefix_ids=sink, allow_unverified=True)
        )
        plan = _with_true_kv(self._plan, true, cache.config)
        tested = replace(self._request, arguments={**arguments, "logits_to_keep": 1})
        cache.watch.blend(plan, tested, cache.prompts.pending, cache.report)
        try:
            blended = self.model(
                **{**without_cache(arguments), **cache_argument(self.model, cache), "use_cache": True}
            )
        finally:
            cache.watch.forward_ends()
        return plan, cache, blended.logits[:, -1], true, output.logits[:, -1]

    def fresh(self, plan: Plan) -> list[Tensor]:
        """`[batch, tokens]` each: the placeholders, and all others that have nothing stored."""
        fresh, ids = torch.from_numpy(plan.fresh(with_reusable=False)), self._request.arguments["input_ids"]
        marks = torch.isin(ids.cpu(), torch.tensor(sorted(self._for.traits.placeholders), dtype=torch.long))
        return [fresh & marks, fresh & ~marks]


@check(first_use=OTHER_INPUTS.name, needs=FirstForward)
@torch.no_grad()
def true_kv(subject: FirstForward) -> CheckResult | None:
    """With the K and V of a plain forward instead of stored ones, a blended forward with images equals the plain."""
    plan, cache, logits, true, expected = subject.run()
    if not plan.chunks:
        return None
    is_fine, bound = subject.model.dtype in FINE, allowed_of(LOGITS, subject.model.dtype)
    errors = [norm_error(logits, expected) * (1 if is_fine else bound / COARSE_LOGITS_BOUND)]
    for fresh in subject.fresh(plan):
        for layer, states in zip(kv_of(cache), true.layers, strict=True):
            for cached, full in zip(layer, states, strict=False):  # a mixer's projections are not kept
                count = cached.shape[2]  # a window of the last tokens, or all
                rows = fresh[:, -count:].to(cached.device)
                rows_now, true_rows = (states[:, :, -count:].transpose(1, 2)[rows] for states in (cached, full))
                errors.append(norm_error(rows_now, true_rows) if is_fine else _median_error(rows_now, true_rows))
    off = f"it is off by {max(errors):.2g}, where at most {bound:.2g} is expected."
    return CheckResult(max(errors), bound, f"with K and V of a plain forward in the place of stored ones {off}")


def _with_true_kv(plan: Plan, true: Capture, config: BlendConfig) -> Plan:
    """The same plan, with K and V of a full prefill in every chunk."""
    distinct, numbers = distinct_tables(true.tables)
    tables = [[tensor.unflatten(0, (-1, plan.real.shape[1])) for tensor in table] for table in distinct]

    def filled(placed: PlacedChunk) -> PlacedChunk:
        row, columns = placed.row, placed.columns
        layers = tuple(tuple(tensor[row, :, columns] for tensor in states) for states in true.layers)
        cut = tuple((cos[row % len(cos), columns], sin[row % len(sin), columns]) for cos, sin in tables)
        return replace(placed, chunk=ChunkKV(placed.chunk.key, layers, cut, numbers), first=0, count=placed.tokens)

    return Plan([*map(filled, plan.chunks)], plan.real.clone(), [*plan.counts], config, store=plan.store).begin()


def _median_error(got: Tensor, true: Tensor) -> float:
    """Median over the tokens of the relative error, `[tokens, …]` each."""
    if got.shape != true.shape:
        return float("inf")
    errors = token_errors(got.flatten(1), true.flatten(1))
    return float(errors.median()) if len(errors) else 0.0
