# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute the KV of chunks, each alone behind a fixed prefix, which is cut off again.

KV is never cut out of a live request, because it would carry what that prompt had before the chunk. The prefix is BOS
and a short text (`context`), or what the caller names.

A forward of many tokens costs less per token than one of few. So several chunks are packed into one row of a batch,
each at positions of its own and hidden from the others by a mask. The prefix that they share is computed once, at the
beginning of the row. A probe decides whether a model's chunks may be packed: a chunk must keep the same bits whatever
chunk is beside it, and the same K and V at the beginning and at the end of a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..prompt.pieces import check_ids
from ..rotary.regime import frequency_regime
from ..rotary.tables import Table, rotary_table
from ..store.chunk import ChunkKey, ChunkKV
from .anatomy import LayerCall, decoder_layers, decoder_of, full_cache, keeps_nothing, stock_layers, text_config
from .attention import STOCK, give_rows, layers_handing_on
from .cache_keyword import cache_argument, without_cache
from .checks import KV, CheckResult, allowed_of, model_probe, relative_error
from .extras import extras_of
from .hooks import hooked
from .identity.canonical import canonical
from .modality import refuse_placeholders, text_ids
from .placement import input_device
from .row_masks import PackedLines

PACK_TOKENS = 2048  # more tokens are no faster
LEAST_SHARED = 16  # tokens before chunks for which this pays
PROBE_TOKENS = 8
_OF_TOKENS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # cache layers without another state


@dataclass(frozen=True)
class Capture:
    """What one plain forward left in the cache, and the tables with which it was rotated."""

    layers: tuple[tuple[Tensor, ...], ...]
    tables: tuple[Table | None, ...]


def capture_chunk(
    model: nn.Module, token_ids: Sequence[int], chunk_prefix_ids: Sequence[int], fingerprint: str
) -> ChunkKV:
    """Compute a chunk's KV behind a prefix, and cut the prefix off."""
    return capture_chunks(model, [ChunkKey(fingerprint, tuple(chunk_prefix_ids), tuple(token_ids))])[0]


def capture_chunks(model: nn.Module, keys: Sequence[ChunkKey]) -> list[ChunkKV]:
    """Compute the KV of several chunks in one forward, in which no chunk sees another."""
    for key in keys:
        check_chunk(model, key.token_ids, key.chunk_prefix_ids)
    shared, *others = {_shared(model, key) for key in keys}
    if len(keys) == 1 and not shared:
        return [cut_chunk(capture(model, torch.tensor([_tokens(keys[0])])), keys[0])]
    if others or not shared:
        captured, ends = _in_one_row(model, [_tokens(key) for key in keys])
        return [cut_chunk(captured, key, *end) for key, end in zip(keys, ends, strict=True)]
    texts = [key.token_ids for key in keys]
    captured, ends = _in_one_row(model, [shared, *texts], len(shared))
    chunks = []
    for key, (start, end) in zip(keys, ends[1:], strict=True):
        chunks.append(cut_chunk(captured, key, start - len(shared), end))
    return chunks


def _tokens(key: ChunkKey) -> tuple[int, ...]:
    return (*key.chunk_prefix_ids, *key.token_ids)


def _shared(model: nn.Module, key: ChunkKey) -> tuple[int, ...]:
    """The prefix of a chunk that is computed once for all chunks that have it; empty if each computes its own.

    A single chunk is computed in the same way, so that its bits do not depend on how many chunks there are.
    """
    prefix = key.chunk_prefix_ids
    return prefix if len(prefix) >= LEAST_SHARED and _may_pack(model) and shared_prefix(model) else ()


def _in_one_row(
    model: nn.Module, texts: Sequence[Sequence[int]], shared: int = 0
) -> tuple[Capture, list[tuple[int, int]]]:
    """Run several texts in one forward; gives the first and last column of each, too.

    No text sees another. But all see the first, if it is `shared`: then that is the number of its tokens.
    """
    ends = list(pairwise(accumulate(map(len, texts), initial=0)))
    ids = [token for text in texts for token in text]
    starts = [start for start, _ in ends]
    positions: list[int] = []
    for start, end in ends:
        first = shared if start else 0
        positions += range(first, first + end - start)
    captured = capture(model, torch.tensor([ids]), torch.tensor([positions]), starts=starts, shared=shared)
    return captured, ends


def keeps_tokens_alone(model: nn.Module) -> bool:
    """Return True if every layer keeps K and V of each token, and no other state."""
    return {type(layer).__name__ for layer in stock_layers(text_config(model))} <= {*_OF_TOKENS_ALONE}


def cut_chunk(captured: Capture, key: ChunkKey, start: int = 0, end: int | None = None) -> ChunkKV:
    """Cut a chunk out of the columns from `start` to `end`, without its prefix."""
    own = slice(start + len(key.chunk_prefix_ids), end)
    tables, layer_table = distinct_tables(captured.tables, own)
    layers = tuple(tuple(tensor[0, :, own].clone() for tensor in states) for states in captured.layers)
    return ChunkKV(key, layers, tables, layer_table)


def capture(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    starts: Sequence[int] = (),
    shared: int = 0,
) -> Capture:
    """Run the decoder once over some tokens, and keep what its layers cached of them.

    It runs without dropout, autocast and gradients, whatever the caller's state.

    Args:
        model: a causal language model.
        input_ids: `[batch, tokens]`.
        position_ids: `[batch, tokens]`; by default 0, 1, 2 …
        attention_mask: `[batch, tokens]`; by default no padding.
        starts: the first columns of several texts in one row, which do not see each other.
        shared: tokens of the first text, if all others see it.
    """
    device = input_device(model)
    inputs = {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": attention_mask}
    inputs = {name: value.to(device) for name, value in inputs.items() if value is not None}
    with canonical(model):
        return _captured(model, inputs, starts, shared)


def _captured(model: nn.Module, arguments: Mapping[str, Any], starts: Sequence[int] = (), shared: int = 0) -> Capture:
    called = decoder_of(model)
    layers, cache, tokens = decoder_layers(model), full_cache(model), arguments["input_ids"].shape[1]
    extras = enumerate(extras_of(model, len(layers)))
    passes = {index: extra.record(cache, tokens) for index, extra in extras if extra is not None}
    with ExitStack() as stack:
        for forward in passes.values():
            stack.callback(forward.leave)
            forward.enter()
        tables = stack.enter_context(_watched(model, cache, tokens, starts, shared))
        called(**{**without_cache(arguments), **cache_argument(called, cache), "use_cache": True})
    indices, stock = range(len(layers)), dict(enumerate(stock_layers(text_config(model))))
    kept = (_states(model, cache, index, tokens, passes.get(index), stock.get(index)) for index in indices)
    return Capture(tuple(kept), tuple(tables.get(index) for index in indices))


def _states(model: nn.Module, cache: Any, index: int, tokens: int, extra: Any, stock: Any) -> tuple[Tensor, ...]:
    """What is kept of a layer, as in `Capture.layers`; `stock` is the cache layer that transformers makes for it."""
    if keeps_nothing(stock):
        return ()
    layer = cache.layers[index] if index < len(cache.layers) else None
    states: tuple[Any, ...] = ()
    if extra is None or hasattr(stock, "keys"):
        states = getattr(layer, "keys", None), getattr(layer, "values", None)
    for tensor in states:
        if not isinstance(tensor, Tensor) or tensor.dim() != 4 or tensor.shape[2] != tokens:
            got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} left {got} in the cache, but keys and values of the form "
                f"[batch, heads, {tokens}, width] are expected. Blending needs them in every layer; use full prefill."
            )
    beside = getattr(layer, "indexer_keys", None) if extra is None else extra.states
    return states if beside is None else (*states, beside[:, None])


@contextmanager
def _watched(
    model: nn.Module, cache: Any, tokens: int, starts: Sequence[int], shared: int
) -> Iterator[dict[int, Table | None]]:
    """Record the rotary tables that layers receive in calls with this cache; other threads may run the model, too.

    With several `starts` each text attends to itself and to what is shared.
    """
    tables: dict[int, Table | None] = {}
    lines: list[tuple[Any, PackedLines]] = []  # by the masks that the model made
    handing_on = layers_handing_on(model) if len(starts) > 1 else frozenset()

    def begins(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is not cache:
            return None
        tables[index] = rotary_table(call.arguments, layer)
        if len(starts) < 2:
            return None
        mask = call.arguments.get(call.mask_name)
        packed = next((made for of, made in lines if of is mask), None)
        if packed is None:
            packed = PackedLines(mask, starts, tokens, call.hidden.device, shared)
            lines.append((mask, packed))
        give_rows(call, packed, index in handing_on)
        return (call.hidden,), call.arguments

    with hooked(enumerate(decoder_layers(model)), begins):
        yield tables


def distinct_tables(
    per_layer: Sequence[Table | None], own: slice = slice(None)
) -> tuple[tuple[Table, ...], tuple[int, ...]]:
    """The different tables of all layers in some columns, and the number of each layer's table (-1: it has none)."""
    seen: dict[int, int] = {}
    tables: list[Table] = []
    for table in per_layer:
        if table is not None and id(table[0]) not in seen:
            seen[id(table[0])] = len(tables)
            cos, sin = (side.reshape(-1, side.shape[-1])[own].float().clone() for side in table)
            tables.append((cos, sin))
    return tuple(tables), tuple(-1 if table is None else seen[id(table[0])] for table in per_layer)


def check_chunk(
    model: nn.Module, token_ids: Sequence[int], chunk_prefix_ids: Sequence[int], name: str = "a chunk"
) -> None:
    """Refuse what cannot be computed alone."""
    refuse_placeholders(model, chunk_prefix_ids, f"what stands before {name}")
    refuse_placeholders(model, token_ids, name)
    config = text_config(model)
    longest = getattr(config, "max_position_embeddings", None)
    check_ids((*chunk_prefix_ids, *token_ids), config)
    if longest is not None and len(chunk_prefix_ids) + len(token_ids) > longest:
        raise PromptError(
            f"{name} of {len(token_ids)} tokens behind a prefix of {len(chunk_prefix_ids)} does not fit the model's "
            f"{longest} positions. Split it into shorter chunks."
        )


def batch_chunks(model: nn.Module, keys: Iterable[ChunkKey]) -> list[list[ChunkKey]]:
    """Group chunks by the forward that computes them."""
    listed, config = list(keys), text_config(model)
    if len(listed) < 2 or not (_may_pack(model) and packed_chunks(model)):
        return [[key] for key in listed]
    most = min(PACK_TOKENS, getattr(config, "attention_chunk_size", None) or PACK_TOKENS)
    packed: list[list[ChunkKey]] = []
    last: dict[object, tuple[int, list[ChunkKey]]] = {}  # by regime and what is shared: the pack to fill, its tokens
    for key in listed:
        tokens, shared = len(_tokens(key)), _shared(model, key)
        kind = frequency_regime(config, tokens), shared
        before, pack = last.get(kind, (most, []))
        if before + tokens - len(shared) > most:
            before, pack = len(shared), []
            packed.append(pack)
        pack.append(key)
        last[kind] = before + tokens - len(shared), pack
    return packed


def _may_pack(model: nn.Module) -> bool:
    return getattr(text_config(model), "_attn_implementation", None) == STOCK


@model_probe
def packed_chunks(model: nn.Module) -> CheckResult:
    """What a model keeps of a chunk does not depend on the chunks that are packed into one forward with it."""
    return _packed(model, "its chunks are computed one by one.")


@model_probe
def shared_prefix(model: nn.Module) -> CheckResult:
    """Where packed chunks share the tokens before them, what a model keeps of one depends on no other either."""
    return _packed(model, "what is before a chunk is computed again for each.", PROBE_TOKENS)


def _packed(model: nn.Module, otherwise: str, shared: int = 0) -> CheckResult:
    alone = CheckResult(float("inf"), 0.0, otherwise, refused=True, value=False)
    if not _may_pack(model) or not keeps_tokens_alone(model):
        return alone
    # The same text twice in a row, and another text between them in each of two rows
    text, neighbour, other, *before = text_ids(model, 3 * PROBE_TOKENS + shared).split(PROBE_TOKENS)
    rows = []
    for between in (neighbour, other):
        texts = [ids.tolist() for ids in (*before, text, between, text)]
        captured, columns = _in_one_row(model, texts, shared)
        first, last = slice(*columns[-3]), slice(*columns[-1])
        states = [tensor for layer in captured.layers for tensor in layer]
        rows.append([(tensor[..., first, :], tensor[..., last, :]) for tensor in states])
    error = 0.0
    for pair, pair_beside_another in zip(*rows, strict=True):
        if not all(map(torch.equal, pair, pair_beside_another)):
            return alone
        error = max(error, relative_error(pair[1], pair[0]))
    result = CheckResult(error, allowed_of(KV, rows[0][0][0].dtype), value=True)
    return result if result.passed else alone
