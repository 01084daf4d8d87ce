# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute the KV of chunks, each alone behind a fixed prefix, which is cut off again.

KV is never cut out of a live request, because it would carry what that prompt had before the chunk. The prefix is BOS
and a short text whose content does not matter, or what the caller names. Behind BOS alone the first tokens of a chunk
become an attention sink, like the beginning of a prompt, and all others have nothing else to attend to. Behind some
prose, of any kind, both are nearly as they are in a prompt. A long prefix is computed once for all chunks of a call,
as a stock cache that each of them continues, if a probe finds that the model computes the same so.

Source of the default prefix: ours; FusionRAG (arXiv 2601.12904) computes a chunk behind its nearest neighbours.
Measured in benchmarks/LOG.md; a text about passages, in the place of passages, or tokens at random do worse.

Behind a chunk a question without content is run over what was computed, and left out again: what it takes from each
token says how much an answer depends on that token, whatever is asked (`importance_of`). No token of a chunk sees it.

A fingerprint is made of what can be read: weights, attributes, code. What cannot be read (another release of a
library, state inside a compiled extension, an edited file of offloaded weights) shows in what the model computes. So a
canary travels with every stored chunk: projections of the K and V that the last layer keeps of eight fixed tokens. It
is compared with the model's own before the chunk is used.
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import PromptError, UnsupportedModelError
from ..prompt.pieces import check_ids
from ..rotary.base import Table, frequency_regime, rotary_table
from ..selectors.attention import Attention
from ..store.chunk import ChunkKey, ChunkKV, Layout
from .anatomy import (
    LayerCall,
    LayerInfo,
    bos_prefix,
    cache_argument,
    canonical,
    decoder_layers,
    decoder_of,
    extras_of,
    full_cache,
    has_indexer,
    hooked,
    input_device,
    is_quantised,
    keeps_nothing,
    per_model,
    refuse_placeholders,
    stock_layers,
    text_config,
    text_ids,
)
from .attention import hook_attention
from .checks import KV, CheckResult, allowed_of, model_probe, relative_error, token_errors
from .identity import fingerprint, state_of

LEAST_SHARED = 16  # tokens of a prefix from which a forward of its own pays
PROBE_TOKENS = 8
LAYOUT_TOKENS = 4
QUESTION_ROWS = 16  # the last ones of a question, that are listened to
_OF_TOKENS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # cache layers without another state
TEXT = """\
The town lies on the east bank of the river, about forty miles from the coast. A railway was built in 1872, and \
the market moved to the square beside the new station. Most families worked at the mill until it closed in the \
spring of 1964.

Margaret Ellis (born 14 May 1931) was a Scottish botanist and writer. She studied in Edinburgh, taught for many \
years, and is best known for her books about the mosses of the northern lakes.

A lens bends light because light travels more slowly in glass than in air. The thicker a lens is in the middle, \
the nearer to it the rays meet, and the smaller the picture becomes.

"""
LEAST_POSITIONS = 1024  # of a model that has room for it beside chunks
MOST_TOKENS = 400  # more show that the tokenizer was made for another language
TOKENS = 8
NUMBERS = 8  # of each token: four of its keys and four of its values, each a sum with random signs
TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3}  # relative; devices and attention functions differ by 1e-5
COARSE_TOLERANCE = 0.15  # bfloat16 and float16, and models whose matrix products are quantised
_canaries: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()
_texts: WeakKeyDictionary[Any, tuple[int, tuple[int, ...]]] = WeakKeyDictionary()  # of tokenizers


@dataclass(frozen=True)
class Capture:
    """What one plain forward left in a cache, which is stock, and the tables with which it was rotated."""

    layers: tuple[tuple[Tensor, ...], ...]
    tables: tuple[Table | None, ...]
    cache: Any = None


def capture_chunk(
    model: nn.Module, token_ids: Sequence[int], chunk_prefix_ids: Sequence[int], fingerprint: str
) -> ChunkKV:
    """Compute a chunk's KV behind a prefix, and cut the prefix off."""
    return next(capture_chunks(model, [ChunkKey(fingerprint, tuple(chunk_prefix_ids), tuple(token_ids))]))


def capture_chunks(
    model: nn.Module, keys: Iterable[ChunkKey], question_ids: tuple[int, ...] = ()
) -> Iterator[ChunkKV]:
    """Compute the KV of chunks, one after the other, and what a question takes of their tokens, if there is one."""
    prefix_caches: dict[tuple[int, ...], Any] = {}
    for key in keys:
        prefix = key.chunk_prefix_ids
        check_chunk(model, key.token_ids, prefix)
        if _continues_prefix(model, key):
            if prefix not in prefix_caches:
                prefix_caches[prefix] = _cache_of(model, prefix)
            captured = _capture_behind(model, prefix_caches[prefix], key.token_ids)
        else:
            captured = capture(model, torch.tensor([[*prefix, *key.token_ids]]))
        chunk = cut_chunk(captured, key)
        if question_ids and _fits_behind(model, key, question_ids):
            importance = importance_of(model, captured.cache, question_ids)
            if importance is not None:
                of_chunk = importance[len(prefix) :]
                chunk = replace(chunk, importance=of_chunk, question=question_digest(question_ids))
        if prefix in prefix_caches:
            surplus = prefix_caches[prefix].get_seq_length() - len(prefix)
            prefix_caches[prefix].crop(-surplus)
        yield chunk


def _continues_prefix(model: nn.Module, key: ChunkKey) -> bool:
    """Whether a chunk is computed behind a cache of its prefix; never depends on what other chunks there are."""
    prefix = key.chunk_prefix_ids
    if len(prefix) < LEAST_SHARED or not cached_prefix(model):
        return False
    config = text_config(model)
    return frequency_regime(config, len(prefix)) == frequency_regime(config, len(prefix) + len(key.token_ids))


def _cache_of(model: nn.Module, prefix: Sequence[int]) -> Any:
    """A stock cache that holds a prefix."""
    return capture(model, torch.tensor([prefix])).cache


def _capture_behind(model: nn.Module, cache: Any, token_ids: Sequence[int]) -> Capture:
    """Run the tokens of a chunk behind a cached prefix; the cache holds both then."""
    prefix_tokens = cache.get_seq_length()
    positions = torch.arange(prefix_tokens, prefix_tokens + len(token_ids))
    return capture(model, torch.tensor([token_ids]), positions[None], cache=cache)


def _fits_behind(model: nn.Module, key: ChunkKey, question_ids: tuple[int, ...]) -> bool:
    """Whether a question has positions behind a chunk, and is rotated by the same frequencies."""
    config = text_config(model)
    tokens = len(key.chunk_prefix_ids) + len(key.token_ids)
    end = tokens + len(question_ids)
    longest = getattr(config, "max_position_embeddings", None)
    has_positions = longest is None or end <= longest
    return has_positions and frequency_regime(config, tokens) == frequency_regime(config, end)


def importance_of(model: nn.Module, cache: Any, question_ids: tuple[int, ...]) -> Tensor | None:
    """What the last rows of a question behind cached tokens take from each of these; the cache has the question then.

    It is attention times the length of V, the mean over these rows, the heads, and the layers that keep all tokens;
    over all layers where each has a window.

    Source: VATP (arXiv 2406.12335) for attention times the length of V.

    Args:
        model: a causal language model.
        cache: a stock cache of one prompt.
        question_ids: of the question, of which the last `QUESTION_ROWS` are listened to.

    Returns:
        `[cached tokens]` float16 on the CPU, from 0 on; None where no layer can be listened to, or overflows.
    """
    # Of the layers that keep all tokens, those whose attention can be listened to
    stock_states = dict(enumerate(stock_layers(text_config(model))))
    keeping_all: list[nn.Module] = []
    with_window: list[nn.Module] = []
    for index, layer in enumerate(decoder_layers(model)):
        states = stock_states.get(index)
        if not has_indexer(states):
            found = with_window if getattr(states, "is_sliding", False) else keeping_all
            found += LayerInfo.of(layer).attention
    modules = keeping_all or with_window
    if not modules:
        return None

    tokens = cache.get_seq_length()
    count = len(question_ids)
    rows = torch.arange(max(0, count - QUESTION_ROWS), count)
    taken: list[Tensor] = []

    def listen(
        stock: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> Any:
        scaling = kwargs.get("scaling") or getattr(module, "scaling", None) or query.shape[-1] ** -0.5
        is_plain = isinstance(mask, Tensor) and mask.dim() == 4
        lines = mask[:, :, -len(rows) :] if is_plain else None
        asking = query[:, :, -len(rows) :]
        columns = rows.to(query.device)[None]
        attention = Attention(asking, key, value, columns, tokens, lines, scaling, kwargs.get("softcap"))
        taken.append(attention.taken(attention.weights())[0, :tokens])
        return stock(module, query, key, value, mask, **kwargs)

    handles = hook_attention(modules, lambda given: listen if any(value is cache for value in given) else None)
    try:
        positions = torch.arange(tokens, tokens + count)
        capture(model, torch.tensor([question_ids]), positions[None], cache=cache)
    finally:
        for handle in handles:
            handle.remove()
    if not taken:
        return None
    importance = torch.stack([of_layer.cpu() for of_layer in taken]).mean(dim=0).half()
    return importance if importance.isfinite().all() else None


def question_digest(question_ids: Sequence[int]) -> str:
    """A short name of a question's ids."""
    return hashlib.sha256(str(tuple(question_ids)).encode()).hexdigest()[:12]


@per_model
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
    return Capture(tuple(kept), tuple(tables.get(index) for index in range(len(layers))), cache)


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


@partial(model_probe, encode=bool, decode=bool)
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


def default_prefix(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """BOS and the text, in a tokenizer's ids.

    BOS alone without a tokenizer or with one that lacks its words, for a model with few positions, and for one that
    keeps more of a chunk than K and V of each token (a mixer's state), which was not measured.
    """
    bos, config = bos_prefix(model), text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    if tokenizer is None or (positions is not None and positions < LEAST_POSITIONS) or not keeps_tokens_alone(model):
        return bos
    ids = _text_ids(tokenizer)
    is_readable = 0 < len(ids) <= MOST_TOKENS and getattr(tokenizer, "unk_token_id", None) not in ids
    return (*bos, *ids) if is_readable else bos


def _text_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids of the text, found once for each size of a tokenizer's vocabulary."""
    if not hasattr(tokenizer, "get_vocab"):
        return tuple(tokenizer.encode(TEXT, add_special_tokens=False))
    size = len(tokenizer)
    if tokenizer not in _texts or _texts[tokenizer][0] != size:
        _texts[tokenizer] = size, tuple(tokenizer.encode(TEXT, add_special_tokens=False))
    return _texts[tokenizer][1]


@partial(per_model, encode=Layout.to_json, decode=Layout.of_json)
def layout_of(model: nn.Module) -> Layout:
    """What a model's KV looks like, read off a forward of a few tokens and not off its config.

    A layer decides itself what it keeps (latent attention, sixteen bits, keys of another width than values).
    """
    return capture_chunk(model, text_ids(model, LAYOUT_TOKENS).tolist(), (), "").layout


def compute_chunks(
    model: nn.Module, keys: Iterable[ChunkKey], tokenizer: str = "", question_ids: tuple[int, ...] = ()
) -> Iterator[ChunkKV]:
    """Compute chunks one after the other, to be stored with the model's canary; arguments as of `capture_chunks`.

    Raises:
        UnsupportedModelError: the model changed after the chunks' keys were made.
    """
    for chunk in capture_chunks(model, keys, question_ids):
        now = fingerprint(model)
        expected = chunk.key.fingerprint
        if expected != now:
            raise UnsupportedModelError(
                f"{type(model).__name__} changed while a chunk was computed: its fingerprint is {now:.12}…, expected "
                f"{expected:.12}…. Nothing is stored. Do not train or patch a model while it is used."
            )
        yield replace(chunk, canary=canary_of(model), tokenizer=tokenizer)


def canary_of(model: nn.Module) -> str:
    """The canary of a model as it is now: base64 of 64 float32, found by one short forward after each change."""
    record, state = _canaries.get(model), state_of(model)
    if record is None or record[0] != state:
        record = _canaries[model] = state, _numbers(model)
    return record[1]


def is_of_model(model: nn.Module, canary: str) -> bool:
    """Whether a chunk's canary is that of a model as it is now, up to the noise of its dtype."""
    own = canary_of(model)
    if canary in (own, ""):
        return True
    stored, expected = _decoded(canary), _decoded(own)
    if stored is None or expected is None:
        return False
    error = token_errors(stored, expected)
    is_coarse = model.dtype not in TOLERANCE or is_quantised(model)
    # in 16 bits the median over the tokens: there one may be sent to another expert for a rounding error
    worst = float(error.median() if is_coarse else error.max())
    return worst <= (COARSE_TOLERANCE if is_coarse else TOLERANCE[model.dtype])


def _numbers(model: nn.Module) -> str:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, text_config(model).vocab_size, (1, TOKENS), generator=draw)
    parts = []
    layers = capture(model, ids).layers
    last = [states for states in layers if states][-1]
    for states in (last[0], last[-1]):
        by_token = states[0].transpose(0, 1).flatten(1).float().cpu()  # [tokens, heads · width]
        signs = torch.randint(0, 2, (by_token.shape[1], NUMBERS // 2), generator=draw).float() * 2 - 1
        parts.append(by_token @ signs / math.sqrt(len(signs)))
    return base64.b64encode(torch.cat(parts, dim=1).contiguous().numpy().tobytes()).decode()


def _decoded(canary: str) -> Tensor | None:
    try:
        raw = base64.b64decode(canary, validate=True)
    except ValueError:
        return None
    if len(raw) != 4 * TOKENS * NUMBERS:
        return None
    return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(TOKENS, NUMBERS)
