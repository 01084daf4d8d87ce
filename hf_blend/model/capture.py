# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute the KV of chunks, each alone behind a fixed prefix, which is cut off again.

KV is never cut out of a live request, because it would carry what that prompt had before the chunk. The prefix is BOS
and a short text (`context`), or what the caller names. A long prefix is computed once for all chunks of a call, as a
stock cache that each of them continues, if a probe finds that the model computes the same so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..prompt.pieces import check_ids
from ..rotary.base import Table, frequency_regime, rotary_table
from ..store.chunk import ChunkKey, ChunkKV
from .anatomy import LayerCall, decoder_layers, decoder_of, full_cache, keeps_nothing, stock_layers, text_config
from .cache_keyword import cache_argument
from .checks import KV, CheckResult, allowed_of, model_probe, relative_error
from .extras import extras_of
from .hooks import hooked
from .identity.canonical import canonical
from .modality import refuse_placeholders, text_ids
from .placement import input_device

LEAST_SHARED = 16  # tokens of a prefix from which a forward of its own pays
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
    return next(capture_chunks(model, [ChunkKey(fingerprint, tuple(chunk_prefix_ids), tuple(token_ids))]))


def capture_chunks(model: nn.Module, keys: Iterable[ChunkKey]) -> Iterator[ChunkKV]:
    """Compute the KV of chunks, one after the other."""
    prefix_caches: dict[tuple[int, ...], Any] = {}
    for key in keys:
        prefix = key.chunk_prefix_ids
        check_chunk(model, key.token_ids, prefix)
        if not _continues_prefix(model, key):
            yield cut_chunk(capture(model, torch.tensor([[*prefix, *key.token_ids]])), key)
            continue
        if prefix not in prefix_caches:
            prefix_caches[prefix] = _cache_of(model, prefix)
        yield cut_chunk(_capture_behind(model, prefix_caches[prefix], key.token_ids), key)


def _continues_prefix(model: nn.Module, key: ChunkKey) -> bool:
    """Whether a chunk is computed behind a cache of its prefix; never depends on what other chunks there are."""
    prefix = key.chunk_prefix_ids
    if len(prefix) < LEAST_SHARED or not cached_prefix(model):
        return False
    config = text_config(model)
    return frequency_regime(config, len(prefix)) == frequency_regime(config, len(prefix) + len(key.token_ids))


def _cache_of(model: nn.Module, prefix: Sequence[int]) -> Any:
    """A stock cache that holds a prefix."""
    cache = full_cache(model)
    capture(model, torch.tensor([prefix]), cache=cache)
    return cache


def _capture_behind(model: nn.Module, cache: Any, token_ids: Sequence[int]) -> Capture:
    """Run the tokens of a chunk behind a cached prefix, and put the cache back to the prefix."""
    prefix_tokens = cache.get_seq_length()
    positions = torch.arange(prefix_tokens, prefix_tokens + len(token_ids))
    captured = capture(model, torch.tensor([token_ids]), positions[None], cache=cache)
    cache.crop(-len(token_ids))
    return captured


def keeps_tokens_alone(model: nn.Module) -> bool:
    """Return True if every layer keeps K and V of each token, and no other state."""
    return {type(layer).__name__ for layer in stock_layers(text_config(model))} <= {*_OF_TOKENS_ALONE}


def cut_chunk(captured: Capture, key: ChunkKey) -> ChunkKV:
    """Cut a chunk out of the last columns of a forward."""
    columns = slice(-len(key.token_ids), None)
    tables, layer_table = distinct_tables(captured.tables, columns)
    layers = []
    for states in captured.layers:
        layers.append(tuple(tensor[0, :, columns].clone() for tensor in states))
    return ChunkKV(key, tuple(layers), tables, layer_table)


def capture(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
) -> Capture:
    """Run the decoder once over some tokens, and keep what its layers cached of them.

    It runs without dropout, autocast and gradients, whatever the caller's state.

    Args:
        model: a causal language model.
        input_ids: `[batch, tokens]`.
        position_ids: `[batch, tokens]`; by default 0, 1, 2 …
        attention_mask: `[batch, tokens]`; by default no padding.
        cache: holds tokens before these, which are in what is kept, too; by default an empty one.
    """
    device = input_device(model)
    arguments = {}
    for name, value in (
        ("input_ids", input_ids),
        ("position_ids", position_ids),
        ("attention_mask", attention_mask),
    ):
        if value is not None:
            arguments[name] = value.to(device)
    tokens_before = 0
    if cache is None:
        cache = full_cache(model)
    else:
        tokens_before = cache.get_seq_length()
    with canonical(model):
        return _captured(model, arguments, cache, tokens_before)


def _captured(model: nn.Module, arguments: Mapping[str, Any], cache: Any, tokens_before: int) -> Capture:
    decoder = decoder_of(model)
    layers = decoder_layers(model)
    tokens = arguments["input_ids"].shape[1]
    tables: dict[int, Table | None] = {}

    def begins(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = LayerCall.bind(layer, args, kwargs)
        if call.cache is cache:  # other threads may run the model, too
            tables[index] = rotary_table(call.arguments, layer)

    passes = {}
    with ExitStack() as stack:
        for index, extra in enumerate(extras_of(model, len(layers))):
            if extra is not None:
                passes[index] = extra.record(cache, tokens)
                stack.callback(passes[index].leave)
                passes[index].enter()
        stack.enter_context(hooked(enumerate(layers), begins))
        decoder(**arguments, **cache_argument(decoder, cache), use_cache=True)

    stock = dict(enumerate(stock_layers(text_config(model))))
    kept = []
    for index in range(len(layers)):
        kept.append(_states(model, cache, index, tokens_before + tokens, passes.get(index), stock.get(index)))
    return Capture(tuple(kept), tuple(tables.get(index) for index in range(len(layers))))


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


@model_probe
def cached_prefix(model: nn.Module) -> CheckResult:
    """Behind a cached prefix a chunk gets the K and V that one forward with the prefix gives it."""
    otherwise = "what is before a chunk is computed again for each."
    if not keeps_tokens_alone(model):
        return CheckResult(float("inf"), 0.0, otherwise, refused=True, value=False)
    ids = text_ids(model, LEAST_SHARED + PROBE_TOKENS).tolist()
    expected = capture(model, torch.tensor([ids]))
    got = _capture_behind(model, _cache_of(model, ids[:LEAST_SHARED]), ids[LEAST_SHARED:])
    error = 0.0
    allowed = 0.0
    for layer, expected_layer in zip(got.layers, expected.layers, strict=True):
        for states, expected_states in zip(layer, expected_layer, strict=True):
            error = max(error, relative_error(states, expected_states))
            allowed = allowed_of(KV, expected_states.dtype)
    is_same = error <= allowed
    return CheckResult(error, allowed, "" if is_same else otherwise, refused=not is_same, value=is_same)
