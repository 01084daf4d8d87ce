# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The question is always computed: at ratio 0 its rows equal those of the plain model over the stored chunks."""

import torch

from ..model.anatomy import full_cache
from .base import Check, Outcome
from .floor import device_of, distance
from .subject import ModelUnderTest

NO_STATE = "has mixers, whose states behind the fused chunks no stock cache can be given; see fused_ratio."


class QuestionIsFresh(Check):
    """The stock model continues a stock cache that holds the fused prefix and chunks."""

    @torch.no_grad()
    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of the question's logits, over requests that run alone."""
        if any(subject.mixers):
            return Outcome(float("inf"), 0.0, f"{type(subject.model).__name__} {NO_STATE}", refused=True)
        errors = []
        for prompt in subject.prompts:
            got, stock = subject.blend([prompt], 0.0), full_cache(subject.model)
            for index, (keys, values) in enumerate(got.layers):
                before = len(prompt.ids) - len(prompt.question)
                stock.update(keys[:, :, :before].clone(), values[:, :, :before].clone(), index)
                indexer_keys = getattr(got.cache.layers[index], "indexer_keys", None)
                if indexer_keys is not None:
                    stock.update_indexer(indexer_keys[:, :before].clone(), index)
            ids = torch.tensor([prompt.question], device=device_of(subject.model))
            wanted = subject.model(ids, past_key_values=stock, use_cache=True).logits.float()
            errors.append(distance(got.asked, wanted))
        return Outcome(max(errors), subject.logit_tolerance)
