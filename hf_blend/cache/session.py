# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions: the content of a cache as one file, which is verified whole before anything of it is used.

    cache.save("chat.session")
    cache = BlendCache.load(model, store, "chat.session")       # in another process, for the same model

The header of the file (see `store.format`) names the model and the settings that it belongs to. The checks come in
this order: the seal of the header, before anything is parsed; the digests of the tensors; the model and the settings;
names, shapes, dtypes and values of the tensors.

The tensors of a `BlendCache`: `ids`, `[tokens]`, of its first tokens as far as they are known; `counts`, `[2]`, how
many tokens are cached and how many of them are exact; `layer.N.*`, what a layer's `state` gives.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StoreError
from ..model.anatomy import cache_argument, input_device, refuse_extended, text_config
from ..model.identity import Author, author_of
from ..rotary.base import frequency_regime
from ..store.chunk import has_usable_values
from ..store.entry import EntryFile, pack_entry
from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.disk import open_regular, write_atomically
from .state import BlendState, CachedTokens

KIND = "hf_blend.conversation/1"
END = 1 << 31  # of token ids and positions
FIXED_PARTS = ("conv_states", "recurrent_states")  # parts of a layer whose size does not grow with the tokens
COMPARED = ("rope", "model", "kv_bits")  # rope first: it is also a part of the model


def save_cache(cache: BlendState, path: str | Path) -> int:
    """See `BlendCache.save`."""
    tokens = cache.kv.length
    _refuse_unsaved(cache, tokens)
    known = []
    if tokens and cache.has_one_regime(tokens):  # as it is taken for when it is loaded
        known = cache.tokens.rows(cache.info.placeholders)[0]
    exact = tokens - cache.inexact_tokens()
    state = {"ids": torch.tensor(known, dtype=torch.long), "counts": torch.tensor([tokens, exact])}
    for index, layer in enumerate(cache.kv.all if tokens else ()):
        if hasattr(layer, "state"):
            for name, tensor in layer.state().items():
                state[f"layer.{index}.{name}"] = tensor
    author = cache.author or author_of(cache.model)
    about = identity(cache.model, author, kv_bits=cache.config.kv_bits)
    return write_session(path, KIND, about, state)


def load_cache(empty: Any, cache: BlendState, path: str | Path) -> None:
    """Load a file into an empty `BlendCache`, whose state is given; see `BlendCache.load`."""
    author = author_of(cache.model)._replace(autocast="", is_training=False)
    state = read_session(path, KIND, identity(cache.model, author, kv_bits=cache.config.kv_bits))
    with refusing(path):
        tokens, exact = _counts(state)
        if not tokens:
            return
        # A forward of one token shows which tensors each layer has, of which shapes and dtypes.
        one_token = state["ids"][:1] if len(state["ids"]) else torch.zeros(1, dtype=torch.long)
        report = cache.report
        with torch.no_grad():
            inputs = {"input_ids": one_token[None].to(input_device(cache.model)), "use_cache": True}
            cache.model(**inputs, **cache_argument(cache.model, empty))
        _check_layers(cache, state, tokens)
        for index, layer in enumerate(cache.kv.all):
            if parts := layer_of(state, index):
                layer.load_state({name: tensor.to(layer.device) for name, tensor in parts.items()}, tokens)
        ids = state["ids"][None]
        cache.tokens = CachedTokens.of(ids, tokens)
        cache.author = author
        cache.regimes = {frequency_regime(cache.info.config, tokens)}
        cache.report = report
        if exact < tokens:
            cache.mark_inexact(exact)


def write_session(path: str | Path, kind: str, about: Mapping[str, str], state: Mapping[str, Tensor]) -> int:
    """Write named tensors to a file, which is replaced atomically; returns its size in bytes."""
    parts = pack_entry(kind, about, state.items())
    try:
        write_atomically(Path(path), parts, durable=True)
    except OSError as error:
        raise StoreError(f"a session cannot be written to {path}: {error}. Check the folder and its space.") from error
    return sum(map(len, parts))


def read_session(path: str | Path, kind: str, expected: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a file; refused unless every byte is what was written, by the model that is `expected`."""
    try:
        with contextlib.closing(open_regular(Path(path))) as source:
            file = EntryFile(source, kind)
            saved, state = file.header.about, file.tensors()
    except OSError as error:
        raise StoreError(f"the session {path} cannot be read: {error}. Give the path of a saved session.") from error
    except EntryFault as fault:
        raise StoreError(
            f"the session {path} is not what was saved: {fault}. Save it again, or give "
            "the path of a session of this version."
        ) from fault
    for name in COMPARED:
        if saved.get(name) != expected.get(name):
            raise StoreError(
                f"the session {path} was saved with another {name} ({saved.get(name)!r:.60}) than this cache's "
                f"({expected.get(name)!r:.60}). Load it with the {name} that it was saved with, or prefill again."
            )
    return state


@contextlib.contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turn any error about the content of a file into a StoreError that names the file."""
    try:
        with as_fault("its content"):
            yield
    except EntryFault as fault:
        raise StoreError(
            f"the session {path} holds what no session of this model holds: {fault}. Save it again, or prefill again."
        ) from fault


def identity(model: nn.Module, author: Author, kv_bits: int | None = None) -> dict[str, str]:
    """What a session belongs to."""
    rope = getattr(text_config(model), "rope_parameters", None)
    return {
        "model": author.stored_name(),
        "rope": json.dumps(rope, sort_keys=True, default=str),
        "kv_bits": "" if kv_bits is None else str(kv_bits),
    }


def layer_of(state: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one layer, without its number in their names."""
    start = f"layer.{index}."
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}


def _refuse_unsaved(cache: BlendState, tokens: int) -> None:
    """Refuse a cache that is not one whole conversation, without padding, at the positions of its model."""
    refuse_extended(cache.model)
    reason = ""
    if cache.kv.memory is not None:
        reason = "are on several devices (kv_device_map), but one is expected. Leave kv_device_map out."
    elif cache.kv.are_partial:
        reason = "were loaded in part, but all of them are expected. Open the store without partial."
    elif cache.kv.batch_size > 1:
        reason = f"are of {cache.kv.batch_size} requests, but one is expected. Save each from a cache of its own."
    elif cache.tokens.is_padded():
        reason = "hold padding, but tokens without gaps are expected. Leave the padding out."
    elif cache.tokens.is_extended:
        reason = "have seen self_extend, but the model's own positions are expected. Prefill outside of the block."
    if reason:
        raise ConfigError(f"save() was asked of a cache whose {tokens} columns {reason}")


def _counts(state: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many tokens are in a saved cache, and how many of them are exact."""
    ids, counts = state["ids"], state["counts"]
    if ids.dim() != 1 or counts.shape != (2,) or {ids.dtype, counts.dtype} != {torch.int64}:
        raise EntryFault("layout", f"ids are {tuple(ids.shape)} of {ids.dtype}, counts {tuple(counts.shape)}")
    tokens, exact = counts.tolist()
    is_possible = len(ids) <= tokens and 0 <= exact <= tokens and bool(((ids >= 0) & (ids < END)).all())
    if not is_possible:
        raise EntryFault("values", f"{len(ids)} ids came with {tokens} tokens, {exact} of them exact")
    return tokens, exact


def _check_layers(cache: BlendState, state: Mapping[str, Tensor], tokens: int) -> None:
    """Raise EntryFault for tensors that are not like those of a cache's layers, which have one token now."""
    names = {"ids", "counts"}
    for index, layer in enumerate(cache.kv.all):
        expected = layer.state() if hasattr(layer, "state") else {}
        names |= {f"layer.{index}.{name}" for name in expected}
        parts = layer_of(state, index)
        for name, one_token in expected.items():
            tensor = parts[name]
            shape, one_shape = list(tensor.shape), list(one_token.shape)
            if not name.startswith(FIXED_PARTS):
                shape[1] = one_shape[1] = 0  # counts tokens
            if shape != one_shape or tensor.dtype != one_token.dtype:
                raise EntryFault("layout", f"{name} of layer {index} is {tuple(tensor.shape)} of {tensor.dtype}")
            if tensor.is_floating_point() and not has_usable_values(tensor):
                raise EntryFault("values", f"{name} of layer {index} is NaN, infinite or absurd")
        if expected and not layer.has_lengths(parts, tokens):
            raise EntryFault("layout", f"the tensors of layer {index} are not of {tokens} tokens")
    if names != {*state}:
        raise EntryFault("layout", f"names of {len(state)} tensors are not those of this model's layers")
