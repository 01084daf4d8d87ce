# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One forward of the model, read once from its arguments; and the prompts that a cache expects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..model.anatomy import PER_TOKEN, other_inputs, text_config
from ..model.identity import Author
from ..prompt.pieces import Prompt, find_continued
from ..store.chunk import ChunkKV
from .plan import PositionRun, PromptRow, copy_to_host, find_runs, is_readable

PADDED_INSIDE = "padding stands behind or between the tokens of a prompt. Pad on the left: padding_side='left'."
NOT_TEXT = "came with the prompt, as with an image, video or sound, but only text is reused: it is computed in full."


@dataclass(frozen=True)
class Request:
    """What one forward of the model brings, read once from its arguments.

    Where no chunk can be reused, `fallback_reason` says why, and what follows `mask` is empty.
    """

    arguments: Mapping[str, Any]  # of the model, by name, without its caches
    past: int  # how many tokens the cache holds
    width: int  # how many columns come, padding included
    fallback_reason: str = ""
    ids: Tensor | None = None  # `[batch, width]`
    mask: Tensor | None = None  # of the columns, `[batch, past + width]`
    rows: Sequence[PromptRow] = ()  # of each batch entry, with the new ids alone
    logits_rows: int = 1  # of how many last tokens the logits are asked for
    length: int | None = None  # one more than the largest position, where the caller passed positions

    @classmethod
    def parse(cls, arguments: Mapping[str, Any], model: nn.Module, past: int, pending: "PendingPrompt") -> "Request":
        """Read the arguments of a forward of the model."""
        ids = arguments.get("input_ids")
        mask = arguments.get("attention_mask")
        states = arguments.get("inputs_embeds") if ids is None else ids
        width = 0 if states is None else states.shape[1]
        arguments = {name: value for name, value in arguments.items() if not hasattr(value, "get_mask_sizes")}
        reason = _why_plain(arguments, model) if width > 1 else ""
        if width > 1 and not reason and (others := other_inputs(model, arguments)):
            reason = f"{', '.join(others)} {NOT_TEXT}"
        request = cls(arguments, past, width, reason, ids, mask)
        if reason or width < 2 or ids is None:
            return request

        # Copy ids, positions and mask to the host
        positions = arguments.get("position_ids")
        new_ids, everywhere, columns_mask = copy_to_host(ids, positions, mask, past)
        length = None
        if positions is not None:
            length = int(everywhere[:, 1:][:, -3:].max()) + 1  # of four axes the first is for masks
        if columns_mask is None:
            columns_mask = np.ones((len(ids), past + width))
        is_real = columns_mask[:, -width:] != 0
        is_cached = columns_mask[:, :-width] != 0

        # Leave out padding
        has_gaps = (is_real[:, 1:] < is_real[:, :-1]).any(axis=1)
        if has_gaps.any() and not (pending.prompts and is_real[:, -1].all()):
            return replace(request, fallback_reason=PADDED_INSIDE)
        rows = []
        for number, real in enumerate(is_real):
            row_ids = tuple(new_ids[number][real].tolist())
            before = int(is_cached[number].sum())
            columns: tuple[int, ...] = ()
            if has_gaps[number]:
                columns = tuple(np.flatnonzero(real).tolist())
            row = PromptRow(
                ids=row_ids,
                end=before + len(row_ids),
                start=width - len(row_ids),
                before=before,
                columns=columns,
                columns_and_positions=everywhere[number][:, real],
            )
            rows.append(row)
        return replace(request, rows=rows, logits_rows=int(arguments["logits_to_keep"]), length=length)

    def real_tokens(self) -> int:
        """How many tokens are not padding, all batch entries; may ask the device."""
        states = self.arguments["inputs_embeds"] if self.ids is None else self.ids
        if isinstance(self.mask, Tensor) and self.mask.dim() == 2:
            return int(self.mask[:, -self.width :].sum())
        return int(states.shape[0]) * self.width


class Edit(NamedTuple):
    """What is reused of a cache behind the first token that a prompt has otherwise.

    Attributes:
        moved: K and V by the number in the prompt of their first token; K is rotated for its old positions.
        author: the model as it was when it computed them.
        fallback_reason: why there are none, where they were asked for.
    """

    moved: Mapping[int, ChunkKV] = MappingProxyType({})
    author: Author | None = None
    fallback_reason: str = ""


NO_EDIT = Edit()


@dataclass(frozen=True)
class PendingPrompt:
    """The prompts that `BlendCache.inputs` built, until their last tokens have come."""

    prompts: tuple[Prompt, ...] = ()  # none: no prompt is expected
    input_ids: Tensor | None = None  # of these side by side, `[batch, tokens]`
    cached: int = 0  # their first tokens, which were in the cache when they were built
    is_begun: bool = False  # some of their tokens have come, and more will
    runs: Sequence[PositionRun] = ()  # for each row, the last of its tokens that came
    is_other: bool = False  # the last forward brought another prompt than the expected one, which is dropped
    tokenizer: str = ""  # digest of the one that made the prompts
    notice: str = ""  # for their report
    edit: Edit = NO_EDIT

    def expects(self, ids: Tensor | None, past: int) -> bool:
        """Whether new ids, `[batch, tokens]`, are the next columns of these prompts; asks the device."""
        if self.input_ids is None or ids is None:
            return False
        expected = self.input_ids[:, past : past + ids.shape[1]]
        repeats, odd = divmod(len(ids), len(expected))  # beams repeat each prompt
        return not odd and torch.equal(ids.cpu(), expected.repeat_interleave(repeats, dim=0))

    def behind(self, request: Request) -> "PendingPrompt":
        """What is pending behind a forward that computed the next tokens of these prompts without chunks."""
        stop = request.past + request.width
        if self.input_ids is None or stop >= self.input_ids.shape[1] or not self.expects(request.ids, request.past):
            return PendingPrompt()
        return replace(self, is_begun=True, runs=())

    def rows(self, request: Request) -> tuple[list[PromptRow], "PendingPrompt"]:
        """For each row of a forward the prompt that it continues; and what is pending after this forward."""
        prompts = None
        if self.prompts:
            new = [row.ids for row in request.rows]
            prompts = find_continued(self.prompts, new, [row.before for row in request.rows])
        is_other = prompts is None
        behind = request.past if is_other else self.cached
        rows = []
        runs = []
        for number, row in enumerate(request.rows):
            run = None
            if is_other:
                row = replace(row, before=0, end=len(row.ids))
            elif len(self.runs) == len(request.rows):
                run = self.runs[number]
            positions, run = find_runs(row.columns_and_positions, row.before, request.past, run)
            runs.append(run)
            row = replace(row, positions=positions, is_first=not behind)
            if prompts is not None:
                prompt = prompts[number]
                row = replace(
                    row,
                    ids=prompt.ids,
                    spans=prompt.spans,
                    prefix=prompt.opening,
                    is_searched=prompt.is_searched,
                    moved=self.edit.moved,
                )
            rows.append(row)
        if is_other:
            return rows, PendingPrompt(is_other=True)
        if all(row.end >= len(row.ids) for row in rows):
            return rows, PendingPrompt()
        return rows, replace(self, is_begun=True, runs=runs)


def _why_plain(arguments: Mapping[str, Any], model: nn.Module) -> str:
    """Say why a forward of several tokens computes all of them; empty if chunks can be reused."""
    ids = arguments.get("input_ids")
    mask = arguments.get("attention_mask")
    keep = arguments.get("logits_to_keep")
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
    for name in PER_TOKEN:
        is_asked = arguments.get(name)
        if is_asked is None:
            is_asked = getattr(config, name, False)
        if is_asked:
            names = ", ".join(PER_TOKEN)
            return f"outputs of every token were asked for: {names} must be off for chunks to be reused."
    if not isinstance(keep, int) or keep < 1:
        return (
            "the logits of every token were asked for, or of some by their places, but a blended prefill computes "
            "only some. Pass logits_to_keep=1, or the number of last tokens whose logits are needed."
        )
    return ""
