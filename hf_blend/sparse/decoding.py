# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding that looks at a few blocks of the context, with selections that hold over several steps.

    with sparse_decoding(model, cache, share=0.25) as sparse:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    print(sparse.metrics)

Works inside stock `generate`: greedy, sampling, beams, prompt lookup and assisted decoding. Prefill stays dense. The
model is entered for one forward at a time, by the name of its attention function.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.blend_cache import BlendCache
from ..cache.static_layer import refuse_static
from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import decoder_layers, has_indexer, stock_layers, text_config
from .config import SparseConfig
from .session import SparseSession

NAME = "hf_blend_sparse_over_"  # before the name of the stock attention function
PADDING_TOKENS = 1024  # by which vocabularies of one tokenizer may differ: 152,064 and 151,936 in Qwen2.5

_running = threading.local()  # whose forward runs on this thread


@contextmanager
def sparse_decoding(
    model: nn.Module,
    cache: BlendCache,
    config: SparseConfig | None = None,
    *,
    draft: nn.Module | None = None,
    draft_selects: bool = False,
    watch_mass: bool = False,
    **settings: Any,
) -> Iterator[SparseSession]:
    """Let the decoding steps of one cache look at a share of its blocks while the block runs.

    Args:
        model: the model that the cache is for.
        cache: whose steps are sparse; all other calls of the model stay dense.
        config: the settings; the defaults where left out.
        draft: the assistant of assisted decoding; it then sees what the verification of its round will see.
        draft_selects: the draft looks at all, and its attention in a round selects what the verification sees.
        watch_mass: measure the share of attention that the selected blocks hold; costs a dense step each time.
        **settings: fields of `SparseConfig` that differ from `config`, such as `share=0.1`.

    Yields:
        The session: its `metrics` and, with `watch_mass`, its `kept_mass`.

    Raises:
        ConfigError: a setting is refused, the cache is for another model, `draft_selects` has no draft, or the draft
            has another vocabulary.
        UnsupportedModelError: no layer of the model attends to its whole context, or an indexer chooses already.
    """
    if cache.model is not model:
        raise ConfigError(
            f"the cache was made for another {type(cache.model).__name__} than this {type(model).__name__}. Pass the "
            "model that it was made for."
        )
    refuse_static(cache.config.max_tokens, "sparse_decoding")
    _check_draft(model, draft, draft_selects)
    merged = SparseConfig(**{**vars(config or SparseConfig()), **settings})
    session = SparseSession(cache, merged, watch_mass)
    if not session.layers:
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} keeps the K and V of its whole context, so there is nothing to "
            "select from: windows are sparse already. Use the cache without sparse decoding."
        )
    doors: list[Door] = []
    try:
        doors.append(Door(model, session))
        if draft is not None:
            doors.append(Door(draft, session.draft(len(decoder_layers(draft)), draft_selects)))
        yield session
    finally:
        for door in doors:
            door.remove()
        session.close()


def _check_draft(model: nn.Module, draft: nn.Module | None, selects: bool) -> None:
    """Blocks are shared by their places, so both must read the same tokens."""
    if selects and draft is None:
        raise ConfigError("draft_selects is True, but draft is None. Pass the assistant that generate is given.")
    sizes = [text_config(one).vocab_size for one in (model, draft) if one is not None]
    if max(sizes) - min(sizes) > PADDING_TOKENS:
        raise ConfigError(
            f"the draft knows {sizes[1]} tokens, expected the {sizes[0]} of the model: selections are shared by the "
            "places of tokens, which another tokenizer cuts elsewhere. Pass a draft of the same family, or none."
        )


def refuse_offloaded(cache: BlendCache) -> None:
    """Refuse a cache whose layers are brought whole: looking at a part of them would bring them twice."""
    if cache.kv_memory is not None:
        raise ConfigError(
            f"the cache has kv_device_map={cache.config.kv_device_map!r}, which brings whole layers, expected a cache "
            "whose K and V are all on their devices. Leave kv_device_map out."
        )


class Door:
    """The hooks on one model: its attention has our name while a forward runs that is ours."""

    def __init__(self, model: nn.Module, guest: Any) -> None:
        if any(map(has_indexer, stock_layers(text_config(model)))):
            raise UnsupportedModelError(
                f"{type(model).__name__} chooses by an indexer what its layers look at, and does so only in the stock "
                "attention. Decode with it as it is."
            )
        self._guest = guest
        self._configs = _attention_configs(model)
        self._before: list[str] = []
        self._is_open = False
        self._handles = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ended, with_kwargs=True, always_call=True),
        ]

    def remove(self) -> None:
        """Leave the model."""
        self._close()
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._guest.owns(kwargs.get("past_key_values")):
            return
        self._close()  # after an interrupt that no hook saw
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        if not self._guest.begin_step(next((one.shape[1] for one in given if isinstance(one, Tensor)), 0)):
            return
        _running.guest, self._is_open = self._guest, True
        for config in self._configs:
            name = config._attn_implementation
            if name in ALL_MASK_ATTENTION_FUNCTIONS:
                AttentionInterface.register(NAME + name, attend)
                AttentionMaskInterface.register(NAME + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
                self._before.append(config._attn_implementation_internal)
                config._attn_implementation_internal = NAME + name

    def _ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._is_open and self._guest.owns(kwargs.get("past_key_values")):
            self._close()
            self._guest.end(failed=output is None)

    def _close(self) -> None:
        for config, before in zip(self._configs, self._before, strict=False):
            config._attn_implementation_internal = before
        self._before, self._is_open, _running.guest = [], False, None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers, over the selected blocks; on another thread the stock one.

    Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch, kv_heads,
    keys, value_dim]` → `[batch, rows, heads, value_dim]`.
    """
    name = module.config._attn_implementation.removeprefix(NAME)
    stock: Callable[..., Any] = functools.partial(
        stock_attention(module, name), module, query, scaling=scaling, dropout=dropout, **kwargs
    )
    guest = getattr(_running, "guest", None)
    is_plain = all(kwargs.get(special) is None for special in ("position_bias", "sliding_window"))
    given = (key, value, attention_mask)
    few = guest.few(int(module.layer_idx), query, *given, name, scaling) if guest and is_plain else None
    if few is None and key.shape[2] > 1 and key.stride(2) == 0:
        raise UnsupportedModelError(
            f"layer {module.layer_idx} of this model attends with a bias or to the K and V of another layer, expected "
            "plain attention to its own: these were not brought to the device. Leave kv_device_map out, or decode "
            "without sparse."
        )
    output: tuple[Tensor, Tensor | None] = stock(*(few or given))
    return output


def stock_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    """Find the attention function that a name stands for in a module."""
    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    found: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], f"{name}_attention_forward", None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} attends with {name!r}, whose function was not found. Load the model with "
            "attn_implementation='sdpa'."
        )
    return found


def _attention_configs(model: nn.Module) -> list[Any]:
    """The configs that the attention modules read the name of their function from."""
    found = {}
    for layer in decoder_layers(model):
        for module in layer.modules():
            config = getattr(module, "config", None)
            if hasattr(module, "layer_idx") and hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
    return list(found.values())
