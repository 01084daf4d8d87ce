# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Trust in a model's images is earned at the first of them, because the self-test has only text to show.

The first forward with other inputs than text is run twice beforehand: plainly, and blended with the plain forward's
own K and V as if they had been stored. With these any share of recomputed tokens gives what the plain forward gives,
so a position, a mask or an addition between the layers that blending misses shows as an error, wherever the images
stand. One such test counts for all forwards of the model with these arguments, this dtype and this attention.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..config import BlendConfig
from ..errors import UnsupportedModelError
from ..model.anatomy import text_config
from ..model.capture import Capture, capture_forward
from ..model.checks import BOUNDS, COARSE_BOUND, FAILURES
from ..model.identity.canonical import notes_kept
from ..model.modality import other_inputs
from ..prefill.plan import PlacedChunk, Plan
from ..store.chunk import ChunkKV

logger = logging.getLogger(__name__)

RATIO = 0.3  # of the chunks' tokens is recomputed: rows are left out, and others stand alone between them
COARSE_LOGITS_BOUND = 0.2  # in 16 bits one token sent to another expert shows in its logits

_complaints: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], str]] = WeakKeyDictionary()  # "": none


class InputTest:
    """Blends one forward next to itself."""

    def __init__(
        self, model: nn.Module, placeholders: frozenset[int], enter: Callable[[Plan, dict[str, Any]], Any]
    ) -> None:
        """Prepare."""
        self._model, self._placeholders, self._enter = model, placeholders, enter

    @staticmethod
    def config(chunk_prefix_ids: tuple[int, ...]) -> BlendConfig:
        """The settings of the cache that is tested."""
        return BlendConfig(RATIO, chunk_prefix_ids=tuple(chunk_prefix_ids), allow_unverified=True)

    @staticmethod
    def is_passed(model: nn.Module, arguments: Mapping[str, Any], of_images: bool = False) -> bool:
        """Whether a forward with such arguments, and chunks of images or not, was tested and found right."""
        return _complaints.get(model, {}).get((*_kind(model, arguments), of_images)) == ""

    def ensure_passed(self, plan: Plan, arguments: dict[str, Any], allow_unverified: bool = False) -> None:
        """Test a forward, if none of its kind was tested before."""
        of_images = any(placed.is_image for placed in plan.chunks)
        known, kind = _complaints.setdefault(self._model, {}), (*_kind(self._model, arguments), of_images)
        complaint = known[kind] if kind in known else self._complaint(plan, arguments)
        if complaint and not allow_unverified:
            known[kind] = complaint
            raise UnsupportedModelError(complaint)
        if complaint and kind not in known:
            logger.warning("the model is used without being verified (allow_unverified): %s", complaint)
        if complaint is not None:
            known[kind] = complaint

    def _complaint(self, plan: Plan, arguments: dict[str, Any]) -> str | None:
        """What speaks against such forwards; empty if nothing does, None if nothing could be tried."""
        name, inputs = type(self._model).__name__, ", ".join(other_inputs(arguments))
        do = "Use full prefill for such prompts, or pass allow_unverified=True to blend them all the same."
        try:
            with notes_kept(self._model):
                share = self._error(plan, arguments)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as broken:
            return (
                f"{name} cannot be blended with {inputs}: the test of its first such forward ended in "
                f"{type(broken).__name__}: {broken} Expected were the K, V and logits of a plain forward. {do}"
            )
        if share is None or share <= 1:
            return None if share is None else ""
        bound = BOUNDS.get(self._model.dtype, COARSE_BOUND)
        return (
            f"{name} cannot be blended exactly with {inputs}: with K and V of a plain forward in the place of stored "
            f"ones it is off by {share * bound:.2g}, where at most {bound:.2g} is expected. {do}"
        )

    @torch.no_grad()
    def _error(self, plan: Plan, arguments: dict[str, Any]) -> float | None:
        """The worst difference of the two forwards in units of what is allowed; None if nothing stored was used."""
        arguments = {**arguments, "return_dict": True}
        if "logits_to_keep" in signature(self._model.forward).parameters:
            arguments["logits_to_keep"] = 1
        true, output = capture_forward(self._model, arguments)
        plan = _with_true_kv(plan, true)
        cache = self._enter(plan, arguments)
        try:
            blended = self._model(**{**arguments, "past_key_values": cache, "use_cache": True})
        finally:
            cache.forward_ends()
        if not plan.chunks:
            return None
        is_fine = self._model.dtype in BOUNDS
        bound = BOUNDS.get(self._model.dtype, COARSE_BOUND)
        last = _share(blended.logits[:, -1], output.logits[:, -1], by_median=False)
        errors = [last * (1 if is_fine else bound / COARSE_LOGITS_BOUND)]
        for fresh in self._fresh(plan, arguments["input_ids"]):
            for layer, states in zip(cache.layers, true.layers, strict=True):
                pair = (
                    (layer.keys, layer.values) if hasattr(layer, "keys") else ()
                )  # a mixer's projections are not kept
                for held, full in zip(pair, states, strict=False):
                    count = held.shape[2]  # a window of the last tokens, or all
                    rows = fresh[:, -count:].to(held.device)
                    got, expected = (states[:, :, -count:].transpose(1, 2)[rows] for states in (held, full))
                    errors.append(_share(got, expected, by_median=not is_fine))
        return max(errors) / bound

    def _fresh(self, plan: Plan, ids: Tensor) -> list[Tensor]:
        """`[batch, tokens]` each: the placeholders, and all others that have nothing stored."""
        fresh = torch.from_numpy(plan.fresh(with_reusable=False))
        marks = torch.isin(ids.cpu(), torch.tensor(sorted(self._placeholders), dtype=torch.long))
        return [fresh & marks, fresh & ~marks]


def _kind(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    attention = getattr(text_config(model), "_attn_implementation", None)
    return model.dtype, attention, other_inputs(arguments)


def _with_true_kv(plan: Plan, true: Capture) -> Plan:
    """The same plan, with K and V of a full prefill in every chunk."""
    held: dict[int, int] = {}
    tables = [table for table in true.tables if table is not None and held.setdefault(id(table[0]), len(held)) >= 0]
    distinct = list({id(table[0]): table for table in tables}.values())
    numbers = tuple(-1 if table is None else held[id(table[0])] for table in true.tables)

    def filled(placed: PlacedChunk) -> PlacedChunk:
        row, columns = placed.row, placed.columns
        layers = tuple(tuple(one[row, :, columns] for one in states) for states in true.layers)
        cut = tuple(
            (cos[row % len(cos), columns].float(), sin[row % len(sin), columns].float()) for cos, sin in distinct
        )
        return replace(placed, chunk=ChunkKV(placed.chunk.key, layers, cut, numbers), first=0, count=placed.tokens)

    return Plan([filled(placed) for placed in plan.chunks], plan.real.clone(), [*plan.counts], store=plan.store)


def _share(got: Tensor, true: Tensor, by_median: bool) -> float:
    """Size of a difference `[tokens, …]` over the size of what is true, of all tokens or of the one in the middle."""
    if not true.numel():
        return 0.0
    if got.shape != true.shape:
        return float("inf")
    errors, sizes = (torch.linalg.vector_norm(part.float().flatten(1), dim=1) for part in (got - true, true))
    scale = sizes.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    share = float((errors.median() if by_median else errors.square().mean().sqrt()) / scale)
    return share if share == share else float("inf")
