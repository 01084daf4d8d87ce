# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the first tokens of each chunk, and more of them the further back the chunk is in the prompt.

What a token misses is the chunks before its own, and a question looks rather at what is near; what a token has is the
text of its own chunk before it. So a token counts by how much is before its chunk, over its index in the chunk.

Source: ours, of EPIC's `boundary`, where all heads are equally long. Measured in benchmarks/results/robust.json.
"""

from torch import Tensor

from .base import Selector, TokenView


class Ramp(Selector):
    """Tokens of chunks before its chunk, up to the middle of that one, over its index in the chunk."""

    needs_kv = False

    def score(self, view: TokenView) -> Tensor:
        """What is missing, raised to a power, over what is there, `[batch, tokens]`."""
        return view.likely_error()
