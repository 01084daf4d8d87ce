# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One forward of the model, read once from its arguments; and the prompts that a cache expects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..model.anatomy import PER_TOKEN, text_config
from ..model.modality import other_inputs
from ..prompt.pieces import PromptBatch
from .plan import PromptRow
from .positions import Run, copy_to_host, find_runs, is_readable

ADAPTERS = ("adapter_names", "alora_offsets")  # of PEFT, which puts hooks into the model for one call
PADDED_INSIDE = "padding stands behind or between the tokens of a prompt. Pad on the left: padding_side='left'."
NOT_TEXT = "came with the prompt, as with an image, video or sound, but only text is reused: it is computed in full."
UNSEEN = (
    "the call of the model was not seen: its forward was called past its hooks, or neither inputs() nor "
    "get_seq_length() of this cache was called before it. Call the object that the cache was made for, or generate."
)


@dataclass(frozen=True)
class Request:
    """What one forward of the model brings, read once from its arguments.

    Where no chunk can be reused, `fallback_reason` says why, and what follows `mask` is empty unless an image came.
    The lists have an item for each batch entry.
    """

    arguments: Mapping[str, Any]  # of the model, by name, without its caches
    past: int  # how many tokens the cache holds
    width: int  # how many columns come, padding included
    fallback_reason: str = ""
    ids: Tensor | None = None  # `[batch, width]`
    mask: Tensor | None = None  # of the columns, `[batch, past + width]`
    rows: Sequence[list[int]] = ()  # the new ids, without padding
    starts: Sequence[int] = ()  # the column of the first of them, among the new columns
    before: Sequence[int] = ()  # how many tokens of the prompt are in the cache already
    columns: Sequence[tuple[int, ...]] = ()  # of each token, where padding is between them; else empty
    places: Sequence[np.ndarray] = ()  # column and positions of each token, `[1 + axes, tokens]`
    logits_rows: int = 1  # of how many last tokens the logits are asked for
    length: int | None = None  # one more than the largest position, where the caller passed positions

    @classmethod
    def parse(
        cls,
        arguments: Mapping[str, Any],
        model: nn.Module,
        past: int,
        pending: "PendingPrompt",
        masked_before: int = 0,
    ) -> "Request":
        """Read the arguments of a forward of the model.

        For `masked_before` new tokens `generate` made masks of four axes before it called the model.
        """
        _refuse(arguments, past)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        states = ids if ids is not None else arguments.get("inputs_embeds")
        width = 0 if states is None else states.shape[1]
        arguments = {name: value for name, value in arguments.items() if not hasattr(value, "get_mask_sizes")}
        if masked_before == width:
            arguments["attention_mask"] = mask = _column_mask(mask, width, pending)
        request = cls(arguments, past, width, _why_plain(arguments, model) if width > 1 else "", ids, mask)
        if request.fallback_reason or width < 2 or ids is None:
            return request
        before, count, positions = max(0, past - pending.cached), ids.shape[0], arguments.get("position_ids")
        new, everywhere, columns_mask = copy_to_host(ids, positions, mask, past)
        length = None if positions is None else int(everywhere[:, 1:][:, -3:].max()) + 1  # a fourth is masks'
        filled = replace(request, logits_rows=int(arguments["logits_to_keep"]))
        if others := other_inputs(model, arguments):
            filled = replace(filled, fallback_reason=f"{', '.join(others)} {NOT_TEXT}")
        filled = replace(filled, starts=[0] * count, before=[before] * count, columns=[()] * count, length=length)
        if columns_mask is None:
            return replace(filled, rows=new.tolist(), places=[*everywhere])
        own, earlier = columns_mask[:, -width:] != 0, columns_mask[:, :-width] != 0
        gaps = (own[:, 1:] < own[:, :-1]).any(axis=1)
        if gaps.any() and not (pending.batch and own[:, -1].all()):
            return replace(request, fallback_reason=PADDED_INSIDE)
        rows = [row[keep].tolist() for row, keep in zip(new, own, strict=True)]
        places = [row[:, keep] for row, keep in zip(everywhere, own, strict=True)]
        columns = [tuple(np.flatnonzero(keep).tolist()) if gap else () for keep, gap in zip(own, gaps, strict=True)]
        filled = replace(filled, rows=rows, starts=[width - len(row) for row in rows], columns=columns, places=places)
        if earlier.shape[1] >= before:
            counts = [int(tokens) for tokens in earlier[:, earlier.shape[1] - before :].sum(axis=1)]
            filled = replace(filled, before=counts)
        return filled

    def in_order(self) -> int:
        """How many first tokens of every prompt are at the positions 0, 1, 2 …; the cached ones are taken to be."""
        if not self.places:
            return self.past + (0 if self.arguments.get("position_ids") is not None else self.width)
        pairs = zip(self.places, self.before, strict=True)
        return min(find_runs(places, before, self.past)[0].in_order for places, before in pairs)

    @classmethod
    def unseen(cls, keys: Tensor, past: int) -> "Request":
        """A forward of which only the keys of its first layer are known, `[batch, kv_heads, tokens, head_dim]`."""
        return cls({}, past, keys.shape[2], UNSEEN if keys.shape[2] > 1 else "", keys[:, 0, :, 0])

    def may_be_padded(self, cached: int) -> bool:
        """Whether there is padding among all columns, or may be: no mask of columns is known of a batch.

        Of `cached` first columns the prompts are no part.
        """
        if self.rows:
            return any((*self.starts, *self.columns, *(before != self.past - cached for before in self.before)))
        if isinstance(self.mask, Tensor) and self.mask.dim() == 2:
            return not bool(self.mask.all())
        is_unknown = self.mask is not None or not self.arguments
        return is_unknown and self.width > 1 and self.ids is not None and self.ids.shape[0] > 1

    def real_tokens(self) -> int:
        """How many tokens are not padding, all batch entries; may ask the device."""
        states = self.arguments["inputs_embeds"] if self.ids is None else self.ids
        if isinstance(self.mask, Tensor) and self.mask.dim() == 2:
            return int(self.mask[:, -self.width :].sum())
        return int(states.shape[0]) * self.width


@dataclass(frozen=True)
class PendingPrompt:
    """The prompts that `BlendCache.inputs` built, until their last tokens have come."""

    batch: PromptBatch | None = None  # None: no prompt is expected
    cached: int = 0  # tokens that were in the cache when they were built, and are no part of them
    is_begun: bool = False  # some of their tokens have come, and more will
    runs: Sequence[Run] = ()  # for each row, the last of its tokens that came
    is_other: bool = False  # the last forward brought another prompt than the expected one, which is dropped

    def is_of(self, input_ids: Tensor) -> bool:
        """Return True if the prompts that are expected are these, `[batch, tokens]`."""
        return self.batch is not None and torch.equal(self.batch.input_ids, input_ids.cpu())

    def rows(self, request: Request) -> tuple[list[PromptRow], "PendingPrompt"]:
        """For each row of a forward the prompt that it continues; and what is pending after this forward."""
        prompts = None if self.batch is None else self.batch.find(request.rows, request.before)
        is_other, count = prompts is None, len(request.rows)
        before = [0] * count if is_other else request.before
        runs: Sequence[Run | None] = self.runs if len(self.runs) == count and not is_other else [None] * count
        places = zip(request.places, before, runs, strict=True)
        followed = [find_runs(own, tokens, request.past, run) for own, tokens, run in places]
        new = zip(request.rows, request.starts, before, request.columns, followed, strict=True)
        behind = request.past if prompts is None else self.cached or any(prompt.history for prompt in prompts)
        rows = [
            PromptRow(tuple(ids), tokens + len(ids), start, tokens, columns, positions, is_first=not behind)
            for ids, start, tokens, columns, (positions, _) in new
        ]
        if prompts is None:
            return rows, PendingPrompt(is_other=True)
        rows = [
            replace(row, ids=prompt.ids, spans=prompt.spans(), prefix=prompt.opening, is_searched=prompt.is_searched)
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        if all(row.end >= len(row.ids) for row in rows):
            return rows, PendingPrompt()
        return rows, replace(self, is_begun=True, runs=[run for _, run in followed])


def _column_mask(mask: Any, width: int, pending: PendingPrompt) -> Any:
    """The mask of the columns, `[batch, columns]`, from the masks of rows and columns that transformers made of it.

    A column that any row sees is a token's: the last row alone does not see what is before its window. Cached columns
    before all that is seen, as where all layers have windows, are as the expected prompts say; else tokens.
    """
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention", next(iter(mask.values()), None))
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = (mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(dim=1)
        past_mask = mask[:, : mask.shape[1] - width]
        unseen = past_mask.any(dim=0).cumsum(dim=0) == 0
        repeats, odd = (0, 1) if pending.batch is None else divmod(len(past_mask), len(pending.batch.prompts))
        if not odd:  # beams repeat the prompts
            real = pending.batch.attention_mask[:, : past_mask.shape[1]].to(past_mask.device).bool()  # type: ignore[union-attr]
            unseen = unseen & real.repeat_interleave(repeats, dim=0)
        past_mask |= unseen
    return mask


def _why_plain(arguments: Mapping[str, Any], model: nn.Module) -> str:
    """Say why a forward of several tokens computes all of them; empty if chunks can be reused."""
    mask, keep, ids = arguments.get("attention_mask"), arguments.get("logits_to_keep"), arguments.get("input_ids")
    config = text_config(model)
    if ids is None:
        return "the prompt came as inputs_embeds, but chunks are found by their tokens. Pass input_ids."
    positions = arguments.get("position_ids")
    if positions is not None and not is_readable(positions, ids):
        return (
            f"position_ids has shape {tuple(getattr(positions, 'shape', ()))}, but {tuple(ids.shape)} is expected, "
            "as of input_ids, or several such axes: stored keys are moved there. Leave it out, or pass such a tensor."
        )
    if mask is not None and getattr(mask, "dim", int)() != 2:
        return "attention_mask does not have two axes. Pass one of [batch, tokens] with 0 on padding, or none."
    if arguments.get("labels") is not None:
        return "labels were passed, and a loss needs the logits of every token. Pass logits_to_keep=1 and no labels."
    if any(getattr(config, name, False) if (own := arguments.get(name)) is None else own for name in PER_TOKEN):
        return f"outputs of every token were asked for: {', '.join(PER_TOKEN)} must be off for chunks to be reused."
    if not isinstance(keep, int) or keep < 1:
        return (
            "the logits of every token were asked for, or of some by their places, but a blended prefill computes "
            "only some. Pass logits_to_keep=1, or the number of last tokens whose logits are needed."
        )
    return ""


def _refuse(arguments: Mapping[str, Any], past: int) -> None:
    """Refuse adapters of one forward, which a chunk's key does not name, and tokens that the cache has already."""
    name = next((name for name in ADAPTERS if arguments.get(name) is not None), None)
    if name:
        raise UnsupportedModelError(
            f"{name}={arguments[name]!r:.60} chooses adapters for this request alone, which the keys of "
            "stored chunks do not name. Choose the adapter for the model with set_adapter."
        )
    ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
    if not past or ids is None or positions is None or positions.dim() != 2 or ids.shape[0] != 1:
        return
    if ids.shape[1] > past and int(positions[0, -1]) + 1 == ids.shape[1]:
        raise PromptError(
            f"the model was given {ids.shape[1]} tokens from position 0 on, but the {past} first of them are in the "
            "cache already: assisted decoding of transformers passes the whole prompt. Call reset() before it, or go "
            "on without an assistant."
        )
