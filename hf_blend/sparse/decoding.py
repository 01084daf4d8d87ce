# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding that looks at a few blocks of the context, with selections that hold over several steps.

    with sparse_decoding(model, cache, share=0.25) as sparse:
        model.generate(**inputs, **cache.keyword, max_new_tokens=64)
    print(sparse.metrics)

Works inside stock `generate`: greedy, sampling, beams, prompt lookup and assisted decoding. Prefill stays dense. The
model's attention is taken in the forwards of one cache only.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import LayerInfo, cache_among, decoder_layers, has_indexer, stock_layers, text_config
from ..model.attention import AttentionFn, AttentionOverride, hook_attention
from .config import SparseConfig
from .session import Draft, SparseSession

PADDING_TOKENS = 1024  # by which vocabularies of one tokenizer may differ: 152,064 and 151,936 in Qwen2.5


@contextmanager
def sparse_decoding(
    model: nn.Module,
    cache: BlendCache,
    config: SparseConfig | None = None,
    *,
    draft: nn.Module | None = None,
    **settings: Any,
) -> Iterator[SparseSession]:
    """A context manager in which each decoding step of a cache attends to a share of its blocks only.

    Args:
        model: a causal language model of transformers.
        cache: of the model; its steps are sparse, all other calls stay dense.
        config: the settings; None takes the defaults.
        draft: the assistant of assisted decoding; it then sees what the verification of its round will see.
        **settings: fields of `SparseConfig` that differ from `config`, such as `share=0.1`.

    Yields:
        The session: its `metrics` count locks, steps and rounds.

    Raises:
        ConfigError: a setting is refused, the cache is for another model or has a kv_device_map, or the draft has
            another vocabulary.
        UnsupportedModelError: no layer of the model attends to its whole context, or an indexer chooses already.
    """
    if cache.model is not model:
        raise ConfigError(
            f"the cache was made for another {type(cache.model).__name__} than this {type(model).__name__}. Pass the "
            "model that it was made for."
        )
    if cache.kv_memory is not None:
        raise ConfigError(
            "sparse decoding was asked of a cache with a kv_device_map, but K and V are expected on the device that "
            "computes them. Leave one of them out."
        )
    if draft is not None:
        _check_draft(model, draft)
    merged = SparseConfig(**{**vars(config or SparseConfig()), **settings})
    session = SparseSession(cache, merged)
    if not session.layers:
        raise UnsupportedModelError(
            f"no layer of {type(model).__name__} keeps the K and V of its whole context, so there is nothing to "
            "select from: windows are sparse already. Use the cache without sparse decoding."
        )
    layers = decoder_layers(model)
    for index in session.layers:
        modules = LayerInfo.of(layers[index]).attention
        if not modules or any(map(_repeats_keys, modules)):
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} computes attention in code of its own, or of keys that it "
                "repeats in its own code, but a function of transformers that is given the cache's keys is expected, "
                "which could be taken. Decode without sparse."
            )
    hooks: list[SparseHooks] = []
    try:
        hooks.append(SparseHooks(model, session))
        if draft is not None:
            hooks.append(SparseHooks(draft, Draft(session, len(decoder_layers(draft)))))
        yield session
    finally:
        for hook in hooks:
            hook.remove()
        session.close()


def _repeats_keys(module: Any) -> bool:
    """Return True for attention of more heads than groups of key heads have: its keys are not the cache's (JetMoe)."""
    heads: Any = getattr(module, "num_heads", None)
    groups: Any = [getattr(module, f"num_key_value_{name}", None) for name in ("heads", "groups")]
    return None not in (heads, *groups) and heads != groups[0] * groups[1]


def _check_draft(model: nn.Module, draft: nn.Module) -> None:
    """Blocks are shared by the positions of their tokens, so both must read the same tokens."""
    expected = text_config(model).vocab_size
    got = text_config(draft).vocab_size
    if abs(got - expected) > PADDING_TOKENS:
        raise ConfigError(
            f"the draft knows {got} tokens, expected the {expected} of the model: selections are shared by the "
            "positions of tokens, which another tokenizer cuts elsewhere. Pass a draft of the same family, or none."
        )


@torch.compiler.disable
def _refuse_compiled() -> None:
    raise ConfigError(
        "a sparse step came from compiled code, but only plain ones can choose what they look at. Pass "
        "disable_compile=True to generate, or decode without sparse."
    )


class SparseHooks:
    """The hooks on one model: its attention goes through a session, or a draft of it, in the forwards that are its."""

    def __init__(self, model: nn.Module, session: Any) -> None:
        if any(map(has_indexer, stock_layers(text_config(model)))):
            raise UnsupportedModelError(
                f"{type(model).__name__} chooses by an indexer what its layers look at, and does so only in the stock "
                "attention. Decode with it as it is."
            )
        self._session = session
        self._thread: int | None = None  # whose forward is the session's
        modules = [module for layer in decoder_layers(model) for module in LayerInfo.of(layer).attention]
        self._handles = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ended, with_kwargs=True, always_call=True),
            *hook_attention(modules, self._choose),
        ]

    def remove(self) -> None:
        """Leave the model."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._thread == threading.get_ident():  # after an interrupt that no hook saw
            self._thread = None
        if self._session.owns(cache_among(kwargs)):
            if torch.compiler.is_compiling():
                _refuse_compiled()
            inputs = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            tokens = next((tensor.shape[1] for tensor in inputs if isinstance(tensor, Tensor)), 0)
            self._thread = threading.get_ident() if self._session.begin_step(tokens) else None

    def _ended(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._thread is not None and self._session.owns(cache_among(kwargs)):
            self._thread = None
            self._session.end(failed=output is None)

    def _choose(self, args: tuple[Any, ...]) -> AttentionOverride | None:
        return self._attend if self._thread == threading.get_ident() else None

    def _attend(
        self,
        stock: AttentionFn,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend to the selected blocks.

        Shapes: query `[batch, heads, rows, head_dim]`, key `[batch, kv_heads, keys, head_dim]`, value `[batch,
        kv_heads, keys, value_dim]` → `[batch, rows, heads, value_dim]`.
        """
        index = int(module.layer_idx)
        selected = None
        if kwargs.get("position_bias") is None and kwargs.get("sliding_window") is None:
            name = module.config._attn_implementation
            selected = self._session.select_kv(index, query, key, value, mask, name)
        if selected is not None:
            key, value, mask = selected
        return stock(module, query, key, value, mask, scaling=scaling, **kwargs)
