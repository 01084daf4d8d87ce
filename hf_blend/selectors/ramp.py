# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the first tokens of each chunk, and more of them the further back the chunk is in the prompt.

What a token misses is the chunks before its own, and a question looks rather at what is near; what a token has is the
text of its own chunk before it. So a token counts by how much is before its chunk, over its index in the chunk.

Source: ours, of EPIC's `boundary`, where all heads are equally long. Measured in benchmarks/results/robust.json.
"""

import torch
from torch import Tensor

from .base import Selector, TokenView

LEAST_TOKENS = 6  # tokens of its own that even the first of a chunk counts as having; 4 to 16 do as well
GROWTH = 1.5  # power of what is missing; 1 and 2 do nearly as well, 0 is `boundary`


class Ramp(Selector):
    """Tokens of chunks before its chunk, up to the middle of that one, over its index in the chunk."""

    needs_kv = False

    def score(self, view: TokenView) -> Tensor:
        """What is missing, raised to a power, over what is there, `[batch, tokens]`."""
        starts = view.columns - view.offset
        first = torch.where(view.reusable, starts, starts.max()).amin(dim=1, keepdim=True)
        missing = (starts - first).float() + view.chunk_tokens / 2
        return torch.where(view.reusable, missing, 0) ** GROWTH / (view.offset + LEAST_TOKENS)
