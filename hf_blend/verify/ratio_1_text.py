# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ratio 1.0 writes the same greedy text as plain generate, alone and in a batch padded on the left."""

from collections.abc import Sequence
from typing import Any

import torch

from ..prompt.pieces import Prompt
from .base import Check, Outcome
from .subject import ModelUnderTest

NEW_TOKENS = 8


class Ratio1Text(Check):
    """Where a token differs, the error is by how much plain generate preferred its own; ties within noise may fall."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """The largest such preference, 0 where the texts are equal. Each of two logits may be off by the tolerance."""
        groups = [*([prompt] for prompt in subject.prompts), subject.prompts]
        return Outcome(max(_preference(subject, group) for group in groups), 2 * subject.logit_tolerance)


@torch.no_grad()
def _preference(subject: ModelUnderTest, prompts: Sequence[Prompt]) -> float:
    cache = subject.cache(1.0)
    inputs = subject.inputs(cache, prompts)
    inputs.pop("position_ids")
    settings: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0,
    }  # fmt: skip
    model, start = subject.model, inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, **settings, output_scores=True, return_dict_in_generate=True)
    mine = model.generate(**inputs, **settings, past_key_values=cache)[:, start:]
    gaps = [0.0]
    for row, (ours, theirs) in enumerate(zip(mine.tolist(), plain.sequences[:, start:].tolist(), strict=True)):
        step = next((step for step, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            scores = plain.scores[step][row].float()
            gaps.append(float(scores[theirs[step]] - scores[ours[step]]))
    return max(gaps)
