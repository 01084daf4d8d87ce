# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a cache knows of the prompt that is coming, and which part of it a forward brings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PromptError
from ..model.anatomy import PER_TOKEN
from ..prompt.pieces import Prompt, PromptBatch, TextPrompt
from .plan import Plan, Planner, PromptRow

PADDED_INSIDE = "padding stands behind or between the tokens of a prompt. Pad on the left: padding_side='left'."
UNSEEN = (
    "the call of the model was not seen: its forward was called past its hooks, or neither inputs() nor "
    "get_seq_length() of this cache was called before it. Call the object that the cache was made for, or generate."
)


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of one forward."""

    rows: list[list[int]]
    starts: list[int]
    seen: list[int]
    width: int
    columns: list[tuple[int, ...]]

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None, before: int, is_built: bool = False) -> "NewTokens | None":
        """Read the arguments of a forward.

        Shapes: ids `[batch, tokens]`, mask `[batch, …]`.
        """
        width = ids.shape[1]
        if mask is None:
            all_ids = ids.tolist()
            return cls(all_ids, [0] * len(all_ids), [before] * len(all_ids), width, [()] * len(all_ids))
        both = torch.cat((ids, mask.to(ids.dtype)), dim=1).cpu().numpy()  # the device is asked once
        new, own, past = both[:, :width], both[:, -width:] != 0, both[:, width:-width] != 0
        gaps = (own[:, 1:] < own[:, :-1]).any(axis=1)
        if gaps.any() and not (is_built and own[:, -1].all()):
            return None
        rows = [row[keep].tolist() for row, keep in zip(new, own, strict=True)]
        columns = [tuple(np.flatnonzero(keep).tolist()) if gap else () for keep, gap in zip(own, gaps, strict=True)]
        is_seen = past.shape[1] >= before
        seen = past[:, past.shape[1] - before :].sum(axis=1).tolist() if is_seen else [before] * len(rows)
        return cls(rows, [width - len(row) for row in rows], [int(count) for count in seen], width, columns)


class PendingPrompt:
    """The prompts that `BlendCache.inputs` built, until their last tokens have been brought."""

    def __init__(self, batch: PromptBatch | None = None, held: int = 0, is_other: bool = False) -> None:
        """Expect some prompts, or nothing."""
        self.batch, self.held, self.is_other = batch, held, is_other
        self.is_begun = False  # a part of the prompts has been brought, and more is to come

    def __bool__(self) -> bool:
        """Whether anything is expected."""
        return self.batch is not None

    def is_of(self, input_ids: Tensor) -> bool:
        """Whether the prompts that are expected are these, `[batch, tokens]`."""
        return self.batch is not None and torch.equal(self.batch.input_ids, input_ids.cpu())

    def plan(self, planner: Planner, brought: NewTokens, past: int) -> tuple[Plan, "PendingPrompt"]:
        """Plan a forward."""
        rows, starts, width = brought.rows, brought.starts, brought.width
        prompts = None if self.batch is None else self.batch.find(rows, brought.seen)
        if prompts is None:
            others = [PromptRow(tuple(row), 0, columns) for row, columns in zip(rows, brought.columns, strict=True)]
            return planner.plan(rows, starts, width, None, past == 0, others), PendingPrompt(is_other=True)
        wholes = [
            PromptRow(prompt.ids, seen, columns, prompt.opening, prompt.is_searched)
            for prompt, seen, columns in zip(prompts, brought.seen, brought.columns, strict=True)
        ]
        beginning = self.held == 0 and not any(prompt.history for prompt in prompts)
        plan = planner.plan(rows, starts, width, [prompt.spans() for prompt in prompts], beginning, wholes)
        return plan, self._rest(prompts, brought)

    def _rest(self, prompts: Sequence[Prompt | TextPrompt], brought: NewTokens) -> "PendingPrompt":
        missing = (
            seen + len(row) < len(prompt.ids)
            for row, seen, prompt in zip(brought.rows, brought.seen, prompts, strict=True)
        )
        if not any(missing):
            return PendingPrompt()
        rest = PendingPrompt(self.batch, self.held)
        rest.is_begun = True
        return rest


def new_tokens(arguments: dict[str, Any]) -> int:
    """How many columns a forward brings."""
    given = (arguments.get("input_ids"), arguments.get("inputs_embeds"))
    return next((states.shape[1] for states in given if states is not None), 0)


def real_tokens(arguments: dict[str, Any]) -> int:
    """How many tokens of a forward are not padding, all batch entries."""
    ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
    given, tokens = arguments["inputs_embeds"] if ids is None else ids, new_tokens(arguments)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return int(mask[:, -tokens:].sum())
    return int(given.shape[0]) * tokens


def with_plain_mask(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward with the mask of its columns, where transformers made one of rows and columns of it.

    Shape: `[batch, columns]`.
    """
    mask = arguments.get("attention_mask")
    if isinstance(mask, Mapping) and len(mask) == 1:
        (mask,) = mask.values()
    if isinstance(mask, Tensor) and mask.dim() == 4:
        mask = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
    return {**arguments, "attention_mask": mask}


def why_plain(arguments: dict[str, Any], config: Any) -> str:
    """Why a forward of several tokens computes all of them."""
    mask, keep = arguments.get("attention_mask"), arguments.get("logits_to_keep")
    if new_tokens(arguments) < 2:
        return ""
    if arguments.get("input_ids") is None:
        return "the prompt came as inputs_embeds, but chunks are found by their tokens. Pass input_ids."
    if mask is not None and getattr(mask, "dim", int)() != 2:
        return "attention_mask does not have two axes. Pass one of [batch, tokens] with 0 on padding, or none."
    if arguments.get("labels") is not None:
        return "labels were passed, and a loss needs the logits of every token. Pass logits_to_keep=1 and no labels."
    if any(_asked(name, arguments, config) for name in PER_TOKEN):
        return f"outputs of every token were asked for: {', '.join(PER_TOKEN)} must be off for chunks to be reused."
    if not isinstance(keep, int) or keep < 1:
        return (
            "the logits of every token were asked for, or of some by their places, but a blended prefill computes "
            "only some. Pass logits_to_keep=1, or the number of last tokens whose logits are needed."
        )
    return ""


def _asked(name: str, arguments: dict[str, Any], config: Any) -> bool:
    given = arguments.get(name)
    return bool(getattr(config, name, False) if given is None else given)


def check_new(arguments: dict[str, Any], past: int) -> None:
    """Refuse a forward that brings again what is in the cache, as stock assisted decoding does on a filled cache."""
    ids, places = arguments.get("input_ids"), arguments.get("position_ids")
    if not past or ids is None or places is None or places.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] <= past:
        return
    if int(places[0, -1]) + 1 == ids.shape[1]:
        raise PromptError(
            f"the model was given {ids.shape[1]} tokens from position 0 on, but the {past} first of them are in the "
            "cache already: assisted decoding of transformers passes the whole prompt. Call reset() before it, or go "
            "on without an assistant."
        )
