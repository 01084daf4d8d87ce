# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute what any question attends to most, is probably wrong, and shares words with this one (the default).

What an answer loses is, to first order, the sum over tokens of how much it takes from each, times how wrong each is.
What is taken depends more on the text than on the question, so it is found once, when a chunk is computed: attention
of a question without content, times the length of the values. How wrong a token is, is estimated by its place, as
`ramp` does. What the question at hand adds are the ids that it shares with a chunk, rare ones counting more. Nothing
is computed in a request, and a chunk without a stored importance counts as `ramp` says.

Source: ours, of VATP (arXiv 2406.12335) for attention times the length of the value.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .base import Selector, TokenView


class StoredImportance(Selector):
    """A product. Options `importance`, `ramp` and `words` leave a factor out where they are False."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"importance": True, "ramp": True, "words": True}

    def score(self, view: TokenView) -> Tensor:
        """Importance times likely error times shared words, `[batch, tokens]`."""
        scores = view.likely_error() if self.options["ramp"] else view.reusable.float()
        if view.weights is None:
            return scores
        weights = view.weights(importance=self.options["importance"], words=self.options["words"])
        return scores * view.at_tokens(weights)
