# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a layer to load, found from a few probe heads: IMPRESS's importance-informed filtering.

Heads of a layer tend to look at the same tokens. So the keys of a few heads are loaded whole, each says which blocks
it finds important, and if they agree more than chance does, what most of them say holds for all heads. If they do not,
the layer is loaded whole.
"""

import math
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

PAPER_PROBES, PAPER_HEADS = 3, 32


def probe_count(kv_heads: int) -> int:
    """How many heads are probed: three of thirty-two as in the paper, but two where there are two to compare."""
    return min(kv_heads, max(2, math.ceil(PAPER_PROBES * kv_heads / PAPER_HEADS)))


def threshold(count: int, total: int, alpha: float) -> float:
    """The agreement that is required: j^alpha, j the mean Jaccard index of random sets of this size."""
    share = count / total
    return float((share / (2 - share)) ** alpha)


def importance(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """How much attention the questions' rows give each key, per KV head; the query heads of a group are summed.

    Shapes: queries `[heads, rows, head_dim]` of the probed KV heads, group by group; keys `[probes, keys, head_dim]`,
    rotated for the prompt; result `[probes, keys]`.
    """
    probes, count, width = keys.shape
    grouped = queries.reshape(probes, -1, width).float()
    return (grouped @ keys.float().transpose(1, 2) * scaling).softmax(dim=-1).view(probes, -1, count).sum(dim=1)


def agreed(scores: Tensor, count: int, alpha: float) -> list[int] | None:
    """Choose the blocks on which probe heads agree, increasing; None if their agreement is not above the threshold.

    The blocks with most votes win, among equals those with the higher mean. Shapes: scores `[probes, blocks]`.
    """
    total = scores.shape[1]
    if count >= total:
        return list(range(total))
    sets = [set(row.topk(count).indices.tolist()) for row in scores]
    if len(sets) > 1 and similarity(sets) <= threshold(count, total, alpha):
        return None
    votes = torch.zeros(total)
    for blocks in sets:
        votes[list(blocks)] += 1
    mean = scores.mean(dim=0)
    ranked = votes + 0.5 * mean / mean.max().clamp_min(1e-20)
    return sorted(ranked.topk(count).indices.tolist())


def similarity(sets: Sequence[set[int]]) -> float:
    """Mean Jaccard index over all pairs."""
    pairs = [len(left & right) / len(left | right) for left, right in combinations(sets, 2)]
    return sum(pairs) / len(pairs)
