# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Begin with the weights of an earlier model of the same shape, whose words differ in part.

The folder holds its `model.safetensors`, and `words.json`: `vocab`, word to id, and `kinds`, kind to words. A word
that both know keeps its embedding; kinds without a namesake, and words of a kind, take over those that are left of
the other in order; what is still new, among it `words.NEW`, is drawn around the mean of its kind.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_blend.evaluation.chains.tokens import vocabulary
from hf_blend.evaluation.chains.words import NEW, OWNERS, THINGS


def earlier_weights(folder: Path) -> dict[str, Tensor]:
    """The state of a `Net`, made from an earlier model's.

    Args:
        folder: of the earlier model.

    Returns:
        The state.
    """
    state = load_file(folder / "model.safetensors")
    known = json.loads((folder / "words.json").read_text("utf-8"))
    old = state.pop("model.embed_tokens.weight").float()
    state.pop("lm_head.weight", None)
    taken = _namesakes(known["vocab"], known["kinds"])
    embedded = old.mean(0) + torch.randn(len(vocabulary()), old.shape[1]) * old.std(0)
    for word, index in vocabulary().items():
        if word in taken:
            embedded[index] = old[known["vocab"][taken[word]]]
    for words in (OWNERS, *THINGS.values()):
        like = old[[known["vocab"][taken[word]] for word in words if word in taken]]
        for word in words:
            if word not in taken:
                embedded[vocabulary()[word]] = like.mean(0) + torch.randn(old.shape[1]) * like.std(0)
    return {**{name: weight.float() for name, weight in state.items()}, "model.embed_tokens.weight": embedded}


def _namesakes(known: dict[str, int], kinds: dict[str, list[str]]) -> dict[str, str]:
    """Our word to the earlier model's word whose embedding it takes over."""
    ours = {word for word in vocabulary() if word not in NEW}
    taken = {word: word for word in ours if word in known}
    free = [kind for kind in kinds if kind not in THINGS]
    for kind, words in THINGS.items():
        other = kind if kind in kinds else free.pop(0)
        taken[kind] = other
        left = [word for word in kinds[other] if word not in words]
        for word in words:
            if word in ours and word not in kinds[other] and left:
                taken[word] = left.pop(0)
    return taken
