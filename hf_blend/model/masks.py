# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Exact masks for scattered rows, and attention that does not pay for what they hide.

When only some tokens flow through a layer, no kernel's built-in causal mask fits: aligned at the bottom right it lets
a row see tokens behind it. So each row carries its own line of the mask, cut out of the mask that the model made for
all rows (padding and windows included), or built from the rows' columns where the model left it out.

`RowMask` is such a mask, a tensor to all code. Handed to `scaled_dot_product_attention` it also does the work, see
`row_attention`. Nothing of it has rows × keys entries, unless some code asks for a plain tensor.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

from .row_attention import attend
from .row_lines import CausalLines, LocalLines, MadeLines, ModelLines, RowLines


def row_mask(
    model_mask: Tensor | BlockMask | None,
    rows: Tensor,
    past: int,
    keys: int,
    implementation: str,
    numbers: Callable[[], list[int]] | None = None,
) -> Tensor | BlockMask:
    """The mask of some rows, for the attention implementation that the model uses.

    Shapes: model_mask `[batch, heads or 1, rows, keys]`, rows `[batch, kept]` → `[batch, heads or 1, kept, keys]`.
    """
    if isinstance(model_mask, BlockMask):
        return _cut_blocks(model_mask, rows, keys)
    lines = row_lines(model_mask, rows, past, keys, None, numbers)
    if implementation == "sdpa":
        return RowMask.of(lines)
    mask = lines.plain()
    if implementation == "eager" and model_mask is None:  # a boolean mask that a model made is what it expects
        return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, torch.finfo(torch.float32).min)
    return mask


def row_lines(
    model_mask: Tensor | None,
    rows: Tensor,
    past: int,
    keys: int,
    window: int | None,
    numbers: Callable[[], list[int]] | None = None,
) -> RowLines:
    """The lines of the mask of some rows.

    Shapes: model_mask `[batch, keys]`, rows `[batch, kept]`.
    """
    if model_mask is not None and model_mask.dim() == 4:
        return ModelLines(model_mask, rows)
    if model_mask is not None or window is not None or rows.shape[0] > 1:
        return LocalLines(rows + past, keys, window, model_mask)
    known = rows[0].tolist if numbers is None else numbers
    if not past:
        return CausalLines(rows, keys, known)
    return CausalLines(rows + past, keys, lambda: [number + past for number in known()])


def looks_ahead(model_mask: Any, row: int, columns: slice, tokens: int, inside: bool = False) -> bool:
    """Whether some of the new tokens see one that stands behind them."""
    if isinstance(model_mask, BlockMask):
        return True
    if not isinstance(model_mask, Tensor) or model_mask.dim() != 4:
        return False
    lines = model_mask[row if model_mask.shape[0] > 1 else 0, :, columns, -tokens:]
    visible = lines if lines.dtype == torch.bool else lines > torch.finfo(lines.dtype).min / 2
    return bool(visible[..., columns.stop :].any() if inside else visible.triu(columns.start + 1).any())


def _cut_blocks(model_mask: BlockMask, rows: Tensor, keys: int) -> BlockMask:
    """The same mask, asked at the rows' places."""
    places = rows.to(model_mask.kv_num_blocks.device)

    def at_rows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return model_mask.mask_mod(batch, head, places[batch, row], key)

    return create_block_mask(at_rows, rows.shape[0], None, rows.shape[1], keys, device=places.device)


class RowMask(Tensor):
    """A boolean or additive mask `[batch, heads or 1, rows, keys]` that attends by blocks of rows.

    Every operation but `scaled_dot_product_attention` sees a plain tensor, which is made only if one asks for it.
    """

    lines: RowLines
    group: int

    @classmethod
    def of(cls, lines: RowLines | Tensor) -> "RowMask":
        """Wrap lines, or a mask `[batch, heads or 1, rows, keys]`; no copy."""
        lines = MadeLines(lines) if isinstance(lines, Tensor) else lines
        wrapped: RowMask = Tensor._make_wrapper_subclass(cls, lines.shape, dtype=lines.dtype, device=lines.device)
        wrapped.lines, wrapped.group = lines, 1
        return wrapped

    @classmethod
    def causal(cls, columns: Tensor, keys: int, numbers: Callable[[], list[int]] | None = None) -> "RowMask":
        """A mask by which each row sees exactly the keys up to its own column.

        Shapes: columns `[1, rows]` → `[1, 1, rows, keys]`.
        """
        return cls.of(CausalLines(columns, keys, numbers or columns[0].tolist))

    @property
    def is_causal(self) -> bool:
        """Whether each row sees exactly the keys up to its own column."""
        return isinstance(self.lines, CausalLines)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take over attention; hand everything else to plain tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is scaled_dot_product_attention:
                return _attend(*args, **(kwargs or {}))
            if func is Tensor.to:
                return args[0]._to(*args[1:], **(kwargs or {}))
            if getattr(func, "__name__", "") == "__get__" or func in _ASKING:
                return func(*args, **(kwargs or {}))
            return func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What comes past `__torch_function__`, such as from C++: plain tensors there too."""
        return func(*tree_map(_as_plain, args), **tree_map(_as_plain, kwargs or {}))

    def plain(self) -> Tensor:
        """The mask as a tensor of its own."""
        return self.lines.plain()

    def _to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same mask elsewhere: accelerate brings the arguments of a layer to where its weights are."""
        moved = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if moved.dtype != self.dtype:
            return self.plain().to(*args, **kwargs)
        if moved.device == self.device:
            return self
        mask = RowMask.of(self.lines.to(moved.device))
        mask.group = self.group
        return mask


_ASKING = {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.ndimension, Tensor.numel}


def _as_plain(value: Any) -> Any:
    return value.plain() if isinstance(value, RowMask) else value


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: RowMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` with a `RowMask`."""
    lines, heads, group = attn_mask.lines, query.shape[1], attn_mask.group
    if lines.shape[2] == 1:  # one line for all queries: transformers has folded the heads of a group into rows
        plain = lines.plain()
        return scaled_dot_product_attention(query, key, value, plain, dropout_p, scale=scale, enable_gqa=enable_gqa)
    if group > 1 and lines.shape[1] == 1 and key.shape[1] == heads:
        key, value = key[:, ::group], value[:, ::group]  # undo the repetition
    return attend(query, key, value, lines, dropout_p, scale)
