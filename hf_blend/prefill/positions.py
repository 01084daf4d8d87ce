# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The positions of a forward's tokens, and which of them are as far from each other as in a stored chunk.

The tokens of a stored chunk were computed one position apart. Where they are so in a prompt, its keys are rotated to
their new positions; where all tokens before it are so too, it may be exact. With a gap, a stride or another order
inside, its tokens attend to each other over other distances: above layer 0 its K and V are not the stored ones, and no
rotation of keys corrects that. Such a chunk is computed, like one that padding divides.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class PositionRun(NamedTuple):
    """The longest run at the end of a prompt's tokens so far in which each is one position behind the one before."""

    start: int  # the number of the first of them in the prompt
    last: np.ndarray  # the column of the last of them, then its positions, `[1 + axes]`


class TokenPositions(NamedTuple):
    """Where the new tokens of one prompt are."""

    starts: np.ndarray  # `[tokens]`: for each token the number of the first one of its run
    is_moved: bool  # token 0 is in another column than 0, or at another position


def is_readable(position_ids: Any, ids: Tensor) -> bool:
    """Whether there is a position for each of `[batch, tokens]`, or for those of all rows, on one axis or several."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() not in (2, 3) or not position_ids.numel():
        return False
    return position_ids.shape[-1] == ids.shape[1] and position_ids.shape[-2] in (1, ids.shape[0])


def copy_to_host(
    ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, past: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Copy ids, positions and mask of a forward behind `past` tokens to the host, in one copy.

    Without `position_ids` each token is at the position of its column.

    Shapes: ids `[batch, tokens]`, position_ids as in `is_readable`, mask `[batch, past + tokens]` → ids, columns and
    positions `[batch, 1 + axes, tokens]`, mask.
    """
    rows, width = ids.shape
    parts = [ids]
    if position_ids is not None:
        axes = position_ids.reshape(-1, *position_ids.shape[-2:]).expand(-1, rows, -1)
        parts.append(axes.transpose(0, 1).flatten(1))
    if mask is not None:
        parts.append(mask)
    is_float = any(part.is_floating_point() for part in parts)
    dtype = torch.float64 if is_float else torch.int64
    joined = torch.cat([part.to(ids.device, dtype) for part in parts], dim=1)
    widths = [part.shape[1] for part in parts]
    copied = [part.numpy() for part in joined.cpu().split(widths, dim=1)]
    new_ids = copied.pop(0).astype(np.int64)
    columns = np.broadcast_to(np.arange(past, past + width), (rows, 1, width))
    positions = columns
    if position_ids is not None:
        positions = copied.pop(0).reshape(rows, -1, width)
    everywhere = np.concatenate((columns, positions), axis=1)
    return new_ids, everywhere, copied[0] if copied else None


def find_runs(
    columns_and_positions: np.ndarray, before: int, past: int, run: PositionRun | None = None
) -> tuple[TokenPositions, PositionRun]:
    """Find the runs of new tokens that are one column and one position apart; returns them, and the last run.

    `before` tokens of the prompt are in the last of the `past` cached columns. `run` is the last run of these; None:
    it begins with token 0 of the prompt.

    Shape: `[1 + axes, tokens]`.
    """
    axes, count = columns_and_positions.shape
    numbers = before + np.arange(count)
    start = 0
    last = np.array([past - 1, before - 1])
    if run is not None:
        start, last = run
    if len(last) != axes:
        last = np.concatenate((last[:1], last[1:2].repeat(axes - 1)))
    if not count:
        return TokenPositions(numbers, False), PositionRun(start, last)
    steps = np.diff(columns_and_positions, axis=1, prepend=last[:, None])
    is_break = (steps != 1).any(axis=0)
    starts = np.maximum.accumulate(np.where(is_break, numbers, start))
    is_moved = bool((columns_and_positions[:, 0] != before).any())
    return TokenPositions(starts, is_moved), PositionRun(int(starts[-1]), columns_and_positions[:, -1])
