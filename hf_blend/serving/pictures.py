# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, and what a forward is given for them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..model.modality import KINDS_OF_TOKENS
from ..prompt.pieces import TextPrompt

__all__ = ["MARK", "PicturePrompt", "is_picture", "model_inputs", "parts_of"]

MARK = {"type": "image"}  # where a chat template puts an image


@dataclass(frozen=True)
class PicturePrompt(TextPrompt):
    """A prompt with images, and what a forward is given for them beside the ids."""

    arguments: Mapping[str, Tensor] = field(default_factory=dict)


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """The content of a message in parts."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def is_picture(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image_url"


def model_inputs(
    model: nn.Module, token_ids: Sequence[int], arguments: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """What a forward of some tokens with images is given, and how many positions fewer they take than tokens.

    There may be more tokens than the prompt had: of an answer that is computed again.
    """
    ids = torch.tensor([token_ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, value in arguments.items():
        is_mark = name.endswith(KINDS_OF_TOKENS)
        given[name] = nn.functional.pad(value, (0, ids.shape[1] - value.shape[1])) if is_mark else value
    given = {name: value.to(model.device) for name, value in given.items()}
    place = getattr(model.base_model, "get_rope_index", None)
    if place is None:
        return given, 0
    taken = {name: value for name, value in given.items() if name in inspect.signature(place).parameters}
    return given, int(place(**taken)[1])
