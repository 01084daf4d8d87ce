# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a forward brings besides text, and which tokens only mark the place where it goes.

The K and V of a placeholder token are those of an image, a video or a sound, and those behind equal ids may differ.
So nothing that holds a placeholder is stored or looked up, and a prompt that comes with an image is computed in full.
Both questions are answered strictly: an argument of the model's forward that is not known to belong to text counts as
another input, and an id under a name of the config that is not known to be a text token counts as a placeholder.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PromptError
from .anatomy import parameter_names, text_config
from .cache_keyword import KEYWORDS
from .fingerprint import per_model

TEXT_ARGUMENTS = frozenset({
    *KEYWORDS, "input_ids", "attention_mask", "position_ids", "cache_position", "layer_past", "inputs_embeds",
    "labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "num_logits_to_keep",
})  # fmt: skip
TEXT_WHERE_ZERO = frozenset({"mm_token_type_ids", "moe_mm_token_type_ids"})  # 0: text
TEXT_TOKENS = frozenset({
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "eod", "decoder_start", "forced_bos", "forced_eos",
    "user", "system", "assistant", "im_start", "im_end",
})  # fmt: skip
MODAL_WORDS = frozenset({
    "image", "img", "im", "video", "vision", "visual", "audio", "speech", "frame", "slice", "patch", "media",
    "newline",
})  # fmt: skip
_ID_FIELD = re.compile(r"_?(?P<stem>.+?)(?P<token>_token)?_(?:ids?|index)")


def other_inputs(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of a forward that may change what its tokens stand for, or who sees whom.

    An input of the model is what its forward names, and whatever holds a tensor (a wrapper names nothing). Anything
    else is a keyword of `generate`, such as a tokenizer.
    """
    named = parameter_names(type(model))  # type: ignore[arg-type]
    others = []
    for name, value in arguments.items():
        if name in TEXT_ARGUMENTS or isinstance(value, bool | int | float | str):
            continue
        if name in TEXT_WHERE_ZERO and isinstance(value, Tensor) and not value.any():
            continue
        if holds_tensor(value) or (name in named and not _is_empty(value)):
            others.append(name)
    return tuple(sorted(others))


def holds_tensor(value: Any) -> bool:
    """Return True for a tensor, and for a list or a mapping that has one inside."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(holds_tensor(item) for item in value)
    return isinstance(value, Tensor)


def _is_empty(value: Any) -> bool:
    """None, and what holds nothing else: `generate` passes such a dict where there was no image to encode."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return all(_is_empty(item) for item in value)
    return value is None


def placeholder_ids(config: Any) -> frozenset[int]:
    """The tokens that stand for something else than text, or mark where it begins and ends."""
    token_ids, configs = set[int](), [config]
    for inner in configs:  # which grows
        for name, value in vars(inner).items():
            field = _ID_FIELD.fullmatch(name)
            if hasattr(value, "to_dict"):
                configs.append(value)
            elif field is not None:
                stem, token = field["stem"], field["token"]
                if stem not in TEXT_TOKENS if token else not MODAL_WORDS.isdisjoint(stem.split("_")):
                    ids = value if isinstance(value, list | tuple) else (value,)
                    token_ids.update(token_id for token_id in ids if type(token_id) is int and token_id >= 0)
    return frozenset(token_ids)


@per_model
def placeholders_of(model: nn.Module) -> frozenset[int]:
    """`placeholder_ids` of a model's config."""
    return placeholder_ids(model.config)


def text_ids(model: nn.Module, tokens: int, seed: int = 0) -> Tensor:
    """Random tokens of text, the same for each number of them and seed; `[tokens]`."""
    others, text = torch.tensor(sorted(placeholder_ids(model.config))), torch.arange(text_config(model).vocab_size)
    text = text[~torch.isin(text, others)]
    return text[torch.randint(len(text), (tokens,), generator=torch.Generator().manual_seed(seed))]


def refuse_placeholders(
    model: nn.Module, token_ids: Iterable[int], what: str, placeholders: frozenset[int] | None = None
) -> None:
    """Refuse tokens whose K and V do not follow from their ids; the placeholders are looked for where not given."""
    refused = (placeholder_ids(model.config) if placeholders is None else placeholders).intersection(token_ids)
    if refused:
        raise PromptError(
            f"{what} holds the placeholder token {min(refused)}, where {type(model).__name__} puts an image, video or "
            "sound: equal tokens would share the KV of different ones, but only text is expected here. Cut the text "
            "there; as a part of a prompt the placeholder is computed in place."
        )
