# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How blending gets into the attention of a layer without changing the model, and exact masks for scattered rows.

A layer of transformers calls its attention by a name in the config, such as "sdpa". `register_attention` puts a
function under that name, once per process. It calls the function that was there before (the stock one), but for calls
with one of two keywords, which layers hand on to it:

* `ROWS`: the `RowLines` of a call in which only some rows of a prompt are computed. The keyword is an argument of the
  layer; `layers_handing_on` finds out which layers hand it on.
* `OVERRIDE`: a function to call instead. A hook of `hook_attention` adds it to the keywords of the attention module.

Keywords belong to one call, so calls of others are not affected. No config and no module is written to.

When a layer computes only some tokens, no kernel's causal mask fits: aligned at the bottom right it lets a row see
tokens behind it. So each row has its own line of the mask. It is cut out of the mask that the model made for all rows
(padding and windows included), or made from the rows' columns where the model made none. `RowLines` are these lines.
They attend by blocks of sorted rows, since stock sdpa would copy K and V once per query head, and flash attention has
no such mask; a block reads no keys that all its rows hide. Nothing has rows × keys entries, unless a layer does not
hand the keyword on and is given `plain()` instead.
"""

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedModelError
from .anatomy import (
    LayerCall,
    LayerInfo,
    cache_argument,
    canonical,
    decoder_layers,
    decoder_of,
    full_cache,
    hooked,
    input_device,
    per_model,
    text_config,
)

BLOCK_ROWS = (64, 1024)  # rows per block on a CPU and on a GPU; fewer look at less in vain, more fill the kernels
SMALL_MASK = (1 << 16, 1 << 18)  # rows x keys up to which one block is faster than several, on a CPU and on a GPU
BLOCK_BYTES = 32 << 20  # of the additive mask of one block
KEPT_BYTES = 32 << 20  # of additive masks that are kept for all layers; larger ones are made where they are used
SPECIAL = ("position_bias", "softcap", "s_aux", "indices")  # arguments of attention that blocks do not take
AttentionFn = Callable[..., tuple[Tensor, Tensor | None]]  # what an attention function of transformers is
STOCK = "sdpa"
OVERRIDE = "hf_blend_override"
ROWS = "hf_blend_rows"
PROBE_TOKENS = 4
FAILURES = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)  # of code that takes no such keyword
AttentionOverride = Callable[..., Any]  # an attention function, with the stock function before all other arguments


class RowBlock(NamedTuple):
    """Neighbouring rows, numbered as in the mask, and the keys that at least one of them sees."""

    rows: slice
    keys: slice


class RowLines(ABC):
    """The lines of a mask `[batch, heads or 1, rows, keys]`, boolean or additive."""

    is_causal = False  # rows see all keys up to their columns, which are on the host

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._biases: dict[tuple[Any, ...], Tensor] = {}

    @abstractmethod
    def cut(self, rows: slice, keys: slice) -> Tensor:
        """The mask of some rows and keys, `[batch, heads or 1, rows, keys]`, in `dtype`."""

    @abstractmethod
    def to(self, device: torch.device, **_: Any) -> "RowLines":
        """The same lines on another device: accelerate brings a layer's arguments to where its weights are."""

    def plain(self) -> Tensor:
        """The whole mask."""
        return self.cut(slice(0, self.shape[2]), slice(0, self.shape[3]))

    def attend(
        self, stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the rows, in the place of a stock function of transformers and with its arguments.

        Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch,
        kv_heads, keys, value_dim]` → `[batch, rows, heads, value_dim]`, and no weights. Keys are not repeated for a
        group of heads.
        """
        special = [name for name in SPECIAL if kwargs.get(name) is not None]
        if special and is_flash(module.config._attn_implementation):
            raise UnsupportedModelError(
                f"attention is {module.config._attn_implementation} with {' and '.join(special)}, but scattered rows "
                "go through sdpa, which has none. Load the model with attn_implementation='eager'."
            )
        if special:
            return stock(module, query, key, value, self.plain(), **kwargs)

        dropout = kwargs.get("dropout", 0.0)
        scale = kwargs.get("scaling")
        batch, heads, _, width = query.shape
        kv_heads = key.shape[1]
        group = heads // kv_heads
        shares_lines = group > 1 and self.shape[1] == 1  # the heads of a group see the same keys
        outputs = []
        for block in self.blocks:
            asking = query[:, :, block.rows]
            rows = asking.shape[2]
            keys, values = key, value
            if (block.keys.start, block.keys.stop) != (0, key.shape[2]):
                keys = key[:, :, block.keys]
                values = value[:, :, block.keys]
            repeats = 1
            if shares_lines and batch == 1:  # one entry for each key head; nothing is copied
                asking = asking.view(kv_heads, group, rows, width)
                keys = keys.transpose(0, 1).expand(-1, group, -1, -1)
                values = values.transpose(0, 1).expand(-1, group, -1, -1)
            elif shares_lines:  # the heads of a group one behind the other, as rows
                asking = asking.reshape(batch, kv_heads, group * rows, width)
                repeats = group
            bias = self.bias(block, query.dtype, repeats)
            is_grouped = group > 1 and not shares_lines
            done = scaled_dot_product_attention(
                asking, keys, values, bias, dropout, scale=scale, enable_gqa=is_grouped
            )
            done = done.view(batch, kv_heads, group, rows, -1)
            outputs.append(done.permute(0, 3, 1, 2, 4).flatten(2, 3))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return output.contiguous(), None

    @cached_property
    def blocks(self) -> list[RowBlock]:
        """Blocks in order; together they hold every row once."""
        rows, keys = self.shape[2:]
        on_gpu = self.device.type == "cuda"
        if rows * keys <= SMALL_MASK[on_gpu]:  # without waiting for the device
            return [RowBlock(slice(0, rows), slice(0, keys))]
        step = min(BLOCK_ROWS[on_gpu], max(64, BLOCK_BYTES // (4 * keys)))
        cut = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        return [RowBlock(block, seen) for block, seen in zip(cut, self._seen_keys(cut), strict=True)]

    def bias(self, block: RowBlock, dtype: torch.dtype, repeats: int = 1) -> Tensor:
        """The additive mask of a block, `[batch or 1, heads or 1, repeats * rows, keys]`."""
        key = (block.rows.start, block.rows.stop, dtype, repeats)
        if key in self._biases:
            return self._biases[key]
        lines = self.cut(block.rows, block.keys)
        if lines.dtype == torch.bool:
            width = lines.shape[3]
            padded = -(-width // 8) * 8  # kernels on a GPU read lines that begin at multiples of 16 bytes
            made = torch.zeros((*lines.shape[:3], padded), dtype=dtype, device=lines.device)
            made = made[..., :width].masked_fill_(lines.logical_not(), float("-inf"))
        else:
            made = lines.to(dtype)
        if repeats > 1:
            made = made.repeat(1, 1, repeats, 1)
        if sum(bias.nbytes for bias in self._biases.values()) + made.nbytes <= KEPT_BYTES:
            self._biases[key] = made
        return made

    def _seen_keys(self, cut: list[slice]) -> list[slice]:
        """By block, from the first to the last of the keys that its rows see; waits for the device once."""
        every = slice(0, self.shape[3])
        seen_by_block = []
        for rows in cut:
            seen_by_block.append(_visible(self.cut(rows, every)).flatten(0, 2).any(0))
        seen = torch.stack(seen_by_block).to(torch.uint8)
        first = seen.argmax(1)
        end = seen.shape[1] - seen.flip(1).argmax(1)
        ends = torch.stack((first, end, seen.amax(1)), dim=1).tolist()
        return [slice(start, stop) if some else every for start, stop, some in ends]


class MadeLines(RowLines):
    """The lines of a mask that the model made: all of them, or those of some rows."""

    def __init__(self, mask: Tensor, rows: Tensor | None = None) -> None:
        """Take a mask `[batch or 1, heads or 1, tokens, keys]` and rows `[batch, kept]`; no copy."""
        batch, count = (mask.shape[0], mask.shape[2]) if rows is None else rows.shape
        super().__init__((batch, mask.shape[1], count, mask.shape[3]), mask.dtype, mask.device)
        self._mask = mask
        self._rows = None if rows is None else rows.to(mask.device)

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`; a view, where all rows are there."""
        if self._rows is None:
            return self._mask[:, :, rows, keys]
        mask = self._mask[..., keys]
        index = self._rows[:, rows]
        if index.shape[0] == 1:
            return mask.index_select(2, index[0])
        return torch.take_along_dim(mask.expand(index.shape[0], *mask.shape[1:]), index[:, None, :, None], dim=2)

    def to(self, device: torch.device, **_: Any) -> RowLines:
        """See `RowLines.to`."""
        return self if device == self.device else MadeLines(self._mask.to(device), self._rows)


class LocalLines(RowLines):
    """The lines of a causal mask: each row sees the keys up to its own column, but for padding, within a window."""

    def __init__(
        self,
        columns: Tensor,
        keys: int,
        window: int | None = None,
        real: Tensor | None = None,
        numbers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Describe the lines.

        Args:
            columns: of the rows, `[batch, rows]`.
            keys: how many there are.
            window: how many keys a row sees; None: all up to its own.
            real: where there is no padding, `[batch, …]`.
            numbers: gives the columns as numbers; only for one entry without window and padding.
        """
        super().__init__((columns.shape[0], 1, columns.shape[1], keys), torch.bool, columns.device)
        self._columns = columns
        self._window = window
        self._real = real
        self._numbers = numbers
        self.is_causal = numbers is not None

    def cut(self, rows: slice, keys: slice) -> Tensor:
        """See `RowLines.cut`."""
        columns = torch.arange(keys.start, keys.stop, device=self.device)
        ends = self._columns[:, None, rows, None]
        seen = columns <= ends
        if self._window is not None:
            seen &= columns > ends - self._window
        if self._real is not None:
            real = self._real[:, -self.shape[3] :][:, None, None, keys]
            seen = seen & real.to(device=seen.device, dtype=torch.bool)
        return seen

    def to(self, device: torch.device, **_: Any) -> RowLines:
        """See `RowLines.to`."""
        if device == self.device:
            return self
        return LocalLines(self._columns.to(device), self.shape[3], self._window, self._real, self._numbers)

    def _seen_keys(self, cut: list[slice]) -> list[slice]:
        if self._numbers is None:
            return super()._seen_keys(cut)
        numbers = self._numbers()
        return [slice(0, numbers[rows.stop - 1] + 1) for rows in cut]


def is_flash(implementation: str) -> bool:
    """Return True for an implementation of flash attention, which transformers knows by its name too."""
    return "flash" in implementation


def _visible(mask: Tensor) -> Tensor:
    """A mask, boolean or additive, as a boolean one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def row_lines(
    model_mask: Tensor | None,
    rows: Tensor,
    past: int,
    keys: int,
    numbers: Callable[[], Sequence[int]] | None = None,
    window: int | None = None,
) -> RowLines:
    """The lines of some rows of a model's mask.

    Shapes: model_mask `[batch, heads or 1, rows, keys]` or `[batch, keys]`, rows `[batch, kept]`.
    """
    if model_mask is not None and model_mask.dim() == 4:
        return MadeLines(model_mask, rows)
    if model_mask is not None or window is not None or rows.shape[0] > 1:
        return LocalLines(rows + past, keys, window, model_mask)
    known = numbers or rows[0].tolist
    if not past:
        return LocalLines(rows, keys, numbers=known)
    return LocalLines(rows + past, keys, numbers=lambda: [number + past for number in known()])


def cut_block_mask(model_mask: BlockMask, rows: Tensor, keys: int) -> BlockMask:
    """The mask of flex attention at some rows, `[batch, kept]`."""
    index = rows.to(model_mask.kv_num_blocks.device)

    def at_rows(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return model_mask.mask_mod(batch, head, index[batch, row], key)

    return create_block_mask(at_rows, rows.shape[0], None, rows.shape[1], keys, device=index.device)


class StopForward(Exception):
    """A layer has come as far as it should."""


def register_attention(name: str) -> None:
    """Wrap the function that transformers has under a name, so that it takes row masks and overrides too."""
    stock = ALL_ATTENTION_FUNCTIONS.get(name)
    if hasattr(stock, "stock"):
        return
    function = partial(_attend, stock)
    function.stock = stock  # type: ignore[attr-defined]
    AttentionInterface.register(name, function)
    if ALL_ATTENTION_FUNCTIONS.get(name) is not function:  # the user's own function is there
        ALL_ATTENTION_FUNCTIONS[name] = function


@lru_cache(maxsize=256)
def eager_function(kind: type[nn.Module]) -> AttentionFn:
    """The function that a class of attention modules calls for "eager", which transformers has under no name."""
    forward = inspect.unwrap(kind.forward)
    names = (*forward.__code__.co_names, "eager_attention_forward")
    functions = (forward.__globals__.get(name) for name in names if name.endswith("eager_attention_forward"))
    function: AttentionFn | None = next((candidate for candidate in functions if candidate is not None), None)
    if function is None:
        raise UnsupportedModelError(
            f"{kind.__name__} attends with 'eager', whose function was not found. Load the model with "
            "attn_implementation='sdpa'."
        )
    return function


def _attend(
    stock: AttentionFn | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What is called in place of a stock function: an override, blocks of rows, or the stock function itself.

    Args:
        stock: the function that was under the name before; None where "eager" has none.
        module: the attention module that calls.
        query: `[batch, heads, rows, head_dim]`.
        key: `[batch, kv_heads, keys, head_dim]`.
        value: `[batch, kv_heads, keys, value_dim]`.
        attention_mask: whatever the stock function takes; with `ROWS` it is not looked at.
        **kwargs: further arguments of the stock function, `OVERRIDE` and `ROWS`.

    Returns:
        The output `[batch, rows, heads, value_dim]`, and the attention weights if the function gives any.
    """
    stock = stock or eager_function(type(module))  # type: ignore[arg-type]
    override = kwargs.pop(OVERRIDE, None)
    if override is None and _marked.keys is key:
        override = _marked.override
        _marked.keys = _marked.override = None  # of these very keys, once
    if override is not None:
        return override(partial(_attend, stock), module, query, key, value, attention_mask, **kwargs)
    rows = kwargs.pop(ROWS, None)
    if rows is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    return rows.attend(stock, module, query, key, value, attention_mask, **kwargs)


class _Marked(threading.local):
    """The keys that a cache has just returned in this thread, and what its layer's attention calls for them."""

    keys: Tensor | None = None
    override: AttentionOverride | None = None


_marked = _Marked()


def with_override(keys: Tensor, override: AttentionOverride) -> Tensor:
    """A view of the keys that a cache returns; the layer's attention calls a function for it instead.

    Where a cache decodes, no hook of it is in the model: what it returns from `update` is all that a layer sees of it.
    """
    _marked.keys = keys.view_as(keys)  # the cache's tensor may be returned elsewhere, too
    _marked.override = override
    return _marked.keys


class _RowProbe:
    """Stands for the rows of one layer, and finds out whether they and the layer's mask reach its attention."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.arrived = False

    def to(self, *_: Any, **__: Any) -> "_RowProbe":
        """The same on another device."""
        return self

    def attend(
        self, stock: AttentionFn, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """Compute nothing."""
        self.arrived = mask is self.mask
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


@partial(per_model, encode=sorted, decode=frozenset)
def layers_handing_on(model: nn.Module) -> frozenset[int]:
    """The layers that hand `ROWS` on to the registered function, and only hand on their mask.

    All others look into the mask (indexers), drop keywords, or attend in code of their own: they need a plain mask. It
    is found by one forward of a few tokens, whose attention computes nothing.
    """
    layers, cache, name = decoder_layers(model), full_cache(model), text_config(model)._attn_implementation or "eager"
    probes: dict[int, _RowProbe] = {}

    def begins(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is not cache or not LayerInfo.of(layer).attention:
            return None
        mask = torch.ones(PROBE_TOKENS, PROBE_TOKENS, dtype=torch.bool, device=call.hidden.device).tril()[None, None]
        probes[index] = _RowProbe(mask)
        call.arguments |= {call.mask_name: mask, ROWS: probes[index]}
        return (call.hidden,), call.arguments

    register_attention(name)
    decoder = decoder_of(model)
    ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.long, device=input_device(model))
    try:
        with canonical(model), hooked(enumerate(layers), begins):
            decoder(input_ids=ids, **cache_argument(decoder, cache), use_cache=True)
    except FAILURES:
        return frozenset()
    return frozenset(index for index, probe in probes.items() if probe.arrived)


def hook_attention(
    modules: Iterable[nn.Module], choose: Callable[[tuple[Any, ...]], AttentionOverride | None]
) -> list[RemovableHandle]:
    """Have attention modules call what `choose` returns for the arguments of each call, until the handles are removed.

    Where it returns None, a call continues as it would without.
    """

    def begins(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        override = None if kwargs is None else choose((*args, *kwargs.values()))
        if override is None:
            return None
        register_attention(module.config._attn_implementation)
        return args, {**kwargs, OVERRIDE: override}  # type: ignore[dict-item]

    return [module.register_forward_pre_hook(begins, with_kwargs=True) for module in modules]


class AttentionCapture:
    """Has a function called once in place of a layer's attention, in the thread that opens it."""

    def __init__(self, layer: nn.Module, take: AttentionOverride) -> None:
        self._modules, self._take = LayerInfo.of(layer).attention, take
        self._handles: list[RemovableHandle] = []

    def open(self, cache: Any = None) -> bool:
        """Wait for the next call, of a forward with this cache or with none.

        Returns:
            False if no attention module is known in the layer: then nothing is called.
        """
        thread = threading.get_ident()

        def choose(arguments: tuple[Any, ...]) -> AttentionOverride | None:
            is_other = any(isinstance(value, Cache) and value is not cache for value in arguments)
            return None if is_other or threading.get_ident() != thread else self._taken

        self.close()
        self._handles = hook_attention(self._modules, choose)
        return bool(self._handles)

    def close(self) -> None:
        """Leave all further calls as they are."""
        while self._handles:
            self._handles.pop().remove()

    def _taken(self, stock: AttentionFn, *args: Any, **kwargs: Any) -> Any:
        """Call the function for the first call of a layer, which may attend twice, and the stock one after it."""
        if not self._handles:
            return stock(*args, **kwargs)
        self.close()
        return self._take(stock, *args, **kwargs)
