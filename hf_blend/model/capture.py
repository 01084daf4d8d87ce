# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute the KV of one chunk alone: behind a fixed sink, with nothing else before it, the sink cut off.

KV is never cut out of a live request: what another prompt put before a chunk would travel with it, unseen.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..prompt.pieces import check_ids
from ..rotary.tables import Table, rotary_table
from ..store.chunk import ChunkKey, ChunkKV
from .anatomy import LayerCall, decoder_layers, decoder_of, full_cache, keeps_nothing, stock_layers, text_config
from .identity.canonical import canonical, notes_kept
from .mixer import ActiveRows, MixerPass
from .mixer_probe import mixers_of
from .modality import refuse_placeholders
from .placement import input_device


@dataclass(frozen=True)
class Capture:
    """What one plain forward left in the cache, and the tables with which it was rotated.

    Attributes:
        layers: (K, V) per layer, each `[batch, kv_heads, tokens, head_dim]`; K rotated for its positions. Or as
            `ChunkKV.layers` has them, with a batch axis in front.
        tables: the rotary table that each layer was handed, None where there was none.
    """

    layers: tuple[tuple[Tensor, ...], ...]
    tables: tuple[Table | None, ...]


def capture_chunk(
    model: nn.Module, token_ids: Sequence[int], sink_ids: Sequence[int], fingerprint: str, namespace: str = ""
) -> ChunkKV:
    """Compute a chunk's KV behind a sink, and cut the sink off.

    Args:
        model: the model to run.
        token_ids: the chunk.
        sink_ids: tokens before it, such as BOS or a system prompt; may be empty.
        fingerprint: identity of the model, from `hf_blend.model.fingerprint`.
        namespace: the tenant that the chunk belongs to.

    Returns:
        K and V of the chunk, K rotated for positions `len(sink_ids) … len(sink_ids) + tokens - 1`.

    Raises:
        PromptError: the chunk is empty, longer than the model's positions, or holds a placeholder of an image.
        UnsupportedModelError: a layer of the model leaves no K/V in its cache.
    """
    check_chunk(model, token_ids, sink_ids)
    key = ChunkKey(fingerprint, tuple(sink_ids), tuple(token_ids), namespace)
    return _behind_sink(capture(model, torch.tensor([[*sink_ids, *token_ids]])), key)


def capture_image(model: nn.Module, key: ChunkKey, arguments: Mapping[str, Any]) -> ChunkKV:
    """Compute an image's KV behind a sink, and cut the sink off.

    Args:
        model: the model to run; it is left as it was.
        key: of the chunk.
        arguments: of the model's forward, by name, for the sink and the image alone, encoded before.

    Returns:
        K and V of the image, K rotated for the positions that the model gives it behind the sink.

    Raises:
        UnsupportedModelError: a layer of the model leaves no K/V in its cache.
    """
    with canonical(model), notes_kept(model):
        return _behind_sink(capture_forward(model, arguments)[0], key)


def _behind_sink(captured: Capture, key: ChunkKey) -> ChunkKV:
    start = len(key.sink_ids)
    tables, layer_table = _distinct(captured.tables, start)
    layers = tuple(tuple(one[0, :, start:].clone() for one in states) for states in captured.layers)
    return ChunkKV(key, layers, tables, layer_table)


def capture(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
) -> Capture:
    """Run the decoder once over some tokens and keep what its layers cached.

    It runs without dropout, autocast and gradients, whatever the caller's state.

    Args:
        model: the model to run, left as it was, after an exception too.
        input_ids: `[batch, tokens]`.
        position_ids: `[batch, tokens]`; from 0 on where left out.
        attention_mask: `[batch, tokens]`, 0 on padding; no padding where left out.

    Returns:
        K, V and rotary tables of every layer.

    Raises:
        UnsupportedModelError: a layer leaves no K/V of the form `[batch, heads, tokens, width]` in the cache.
    """
    layers = decoder_layers(model)
    device = input_device(model)
    given = {"position_ids": position_ids, "attention_mask": attention_mask}
    given = {name: value.to(device) for name, value in given.items() if value is not None}
    cache, tokens = full_cache(model), input_ids.shape[1]
    recorded = _recorded_projections(model, cache, tokens)
    with recorded as passes, canonical(model), _recorded_tables(layers, cache) as tables:
        decoder_of(model)(input_ids=input_ids.to(device), past_key_values=cache, use_cache=True, **given)
    return _captured(model, cache, tokens, tables, passes)


@torch.no_grad()
def capture_forward(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[Capture, Any]:
    """Run the model once as it was called, images and all, through a plain cache of its own.

    Args:
        model: the model to run.
        arguments: of its forward, by name, without the cache; for a prompt that starts the cache.

    Returns:
        K, V and rotary tables of every layer, and what the model returned.

    Raises:
        UnsupportedModelError: a layer leaves no K/V of the form `[batch, heads, tokens, width]` in the cache.
    """
    cache, tokens = full_cache(model), arguments["input_ids"].shape[1]
    recorded = _recorded_projections(model, cache, tokens)
    with recorded as passes, _recorded_tables(decoder_layers(model), cache) as tables:
        output = model(**{**arguments, "past_key_values": cache, "use_cache": True})
    return _captured(model, cache, tokens, tables, passes), output


def _captured(
    model: nn.Module, cache: Any, tokens: int, tables: dict[int, Table | None], passes: dict[int, MixerPass]
) -> Capture:
    indices, stock = range(len(decoder_layers(model))), dict(enumerate(stock_layers(text_config(model))))
    kept = tuple(_states(model, cache, index, tokens, passes.get(index), stock.get(index)) for index in indices)
    return Capture(kept, tuple(tables.get(index) for index in indices))


def _states(
    model: nn.Module, cache: Any, index: int, tokens: int, mixer: MixerPass | None, stock: Any
) -> tuple[Tensor, ...]:
    """What is kept of a layer, as in `Capture.layers`; `stock` is the cache layer that transformers makes for it."""
    if keeps_nothing(stock):
        return ()
    has_keys = mixer is None or hasattr(stock, "keys")
    states = _cached(model, cache, index, tokens) if has_keys else ()
    index_keys = getattr(cache.layers[index], "indexer_keys", None)
    beside = index_keys if mixer is None else mixer.states
    return states if beside is None else (*states, beside[:, None])


@contextmanager
def _recorded_projections(model: nn.Module, cache: Any, tokens: int) -> Iterator[dict[int, MixerPass]]:
    """What the mixers' projections give in calls with this cache, by layer."""
    rows = ActiveRows(None, tokens, {})
    mixers = {index: mixer for index, mixer in enumerate(mixers_of(model)) if mixer is not None}
    passes = {index: MixerPass(mixer, cache, rows) for index, mixer in mixers.items()}
    try:
        for one in passes.values():
            one.enter()
        yield passes
    finally:
        for one in passes.values():
            one.leave()


@contextmanager
def _recorded_tables(layers: list[nn.Module], cache: object) -> Iterator[dict[int, Table | None]]:
    """The tables that the layers are handed in calls with this cache; other threads may run the model meanwhile."""
    tables: dict[int, Table | None] = {}

    def record(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        arguments = LayerCall.bind(layer, args, kwargs or {}).arguments  # None: as in `hf_blend.model.hooks`
        if any(value is cache for value in arguments.values()):
            tables[index] = rotary_table(arguments, layer)

    handles = []
    try:
        for index, layer in enumerate(layers):
            hook = lambda module, args, kwargs=None, index=index: record(index, module, args, kwargs)  # noqa: E731
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield tables
    finally:
        for handle in handles:
            handle.remove()


def _cached(model: nn.Module, cache: Any, index: int, tokens: int) -> tuple[Tensor, Tensor]:
    layer = cache.layers[index] if index < len(cache.layers) else None
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    for states in (keys, values):
        if not isinstance(states, Tensor) or states.dim() != 4 or states.shape[2] != tokens:
            got = tuple(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} left {got} in the cache, but keys and values of the form "
                f"[batch, heads, {tokens}, width] are wanted. Blending needs them in every layer; use full prefill."
            )
    return keys, values


def _distinct(per_layer: tuple[Table | None, ...], start: int) -> tuple[tuple[Table, ...], tuple[int, ...]]:
    """The different tables among the layers', cut at the sink, and which layer has which (-1: none)."""
    seen: dict[int, int] = {}
    tables: list[Table] = []
    for table in per_layer:
        if table is not None and id(table[0]) not in seen:
            seen[id(table[0])] = len(tables)
            cos, sin = (part[0, start:].float().clone() for part in table)
            tables.append((cos, sin))
    return tuple(tables), tuple(-1 if table is None else seen[id(table[0])] for table in per_layer)


def check_chunk(model: nn.Module, token_ids: Sequence[int], sink_ids: Sequence[int], name: str = "a chunk") -> None:
    """Refuse what cannot be computed alone.

    Args:
        model: that would compute it.
        token_ids: the chunk.
        sink_ids: tokens before it.
        name: of the chunk, as the subject of a message.

    Raises:
        PromptError: the chunk is empty, longer than the model's positions, or holds a placeholder of an image or an id
            that the model does not know.
    """
    refuse_placeholders(model, sink_ids, f"what stands before {name}")
    refuse_placeholders(model, token_ids, name)
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    check_ids((*sink_ids, *token_ids), config)
    if not token_ids:
        raise PromptError(f"{name} has 0 tokens, but at least one is expected. Leave empty documents out.")
    if longest is not None and len(sink_ids) + len(token_ids) > longest:
        raise PromptError(
            f"{name} of {len(token_ids)} tokens behind a sink of {len(sink_ids)} does not fit the model's {longest} "
            "positions. Split it into shorter chunks."
        )
