# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entering a stock model for one forward, and leaving it as it was, after an exception too.

Hooks are registered when a blended forward begins and removed when the model returns or raises. They carry no state:
each looks for its own cache among the arguments and does nothing without it, so plain calls and other caches pass
through. A hook that ends while another thread's call is about to run it is called by torch without its keyword
arguments. A copy of a model that is watched has hooks that see nothing.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import ConfigError
from .anatomy import LayerCall, parameter_names, wants_all_rows


class ForwardHooks:
    """The hooks of one cache in one model. They hold no reference to the cache and go with it.

    A listener, the cache itself if there is no other, is called in the forwards that carry the cache. Its
    `forward_begins(arguments)` receives the model's arguments by name, and returns those that the model receives, None
    for the same. Its `forward_ends(failed)` is called behind the model, also after an exception; if it returns True,
    the model is called again. Of its `prefill` the `enter(index, call)` is called before a layer, and may change the
    arguments of the call.
    """

    def __init__(
        self, cache: Any, model: nn.Module, layers: Sequence[nn.Module] = (), listener: Any | None = None
    ) -> None:
        self._cache: Callable[[], Any] = weakref.ref(cache)
        self._listener: Callable[[], Any] = weakref.ref(cache if listener is None else listener)
        self._model, self._layers = model, layers
        self._fills_rows = bool(layers) and wants_all_rows(model)
        self._before, self._after = list[RemovableHandle](), list[RemovableHandle]()  # on the model
        self._inner: list[RemovableHandle] = []  # on its layers
        self._is_raising = self._is_inside = False
        self._finalizer = weakref.finalize(cache, _remove, self._before, self._after, self._inner)
        self._finalizer.atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to a copy of the model, where no call carries the cache."""
        return _without_cache, ()

    def watch_model(self) -> None:
        """See every call of the model, to learn its arguments, as long as the cache lives."""
        for module in callable_as(self._model):
            self._before.append(module.register_forward_pre_hook(self._model_begins, with_kwargs=True))

    def enter_layers(self, width: int) -> None:
        """See every decoder layer begin."""
        if self._inner:
            return
        for index, layer in enumerate(self._layers):
            self._inner.append(layer.register_forward_pre_hook(partial(self._layer_begins, index), with_kwargs=True))
        if self._fills_rows:
            fill = partial(self._fill_rows, width)
            self._inner.append(self._layers[-1].register_forward_hook(fill, with_kwargs=True))

    def leave(self) -> None:
        """Remove every hook but those that watch the model."""
        # because of an exception torch walks along the hooks behind the model: one that others follow stays for now
        staying = [handle for handle in self._after if self._is_raising and _is_followed(handle)]
        self._after[:] = [handle for handle in self._after if handle not in staying]
        _remove(self._inner, self._after)
        self._after += staying

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let calls of the model pass that are made in the midst of a forward; layers are hooked still."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _model_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        listener = None if self._is_inside else self._own(args, kwargs)
        if listener is None or kwargs is None:
            return None
        names = parameter_names(type(module)) or ("input_ids", "attention_mask")  # type: ignore[arg-type]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if self._layers and torch.compiler.is_compiling():
            ids = arguments.get("input_ids")
            if ids is None or ids.shape[1] != 1:
                _refuse_compiled()
            return None  # a compiled step appends its token without being noticed
        if self._after:
            listener.forward_ends(failed=True)  # the last forward was interrupted in a way that no hook sees
        # registered only now, it is the last one: after an exception torch walks along these hooks, and none but
        # the last may be removed on the way
        self._after.append(module.register_forward_hook(self._ended, with_kwargs=True, always_call=True))
        changed = listener.forward_begins(arguments)
        return None if changed is None else ((), changed)

    def _ended(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        kwargs, output = rest if len(rest) == 2 else (None, *rest)
        listener = None if self._is_inside else self._own(args, kwargs)
        if listener is None:
            return None
        self._is_raising = output is None
        runs_again = listener.forward_ends(failed=self._is_raising)
        self._is_raising = False
        return module(*args, **(kwargs or {})) if runs_again else None

    def _layer_begins(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        listener = None if kwargs is None else self._own(args, kwargs)
        if listener is None or listener.prefill is None:  # it is over, and another call of the layer is under way
            return None
        call = LayerCall.bind(layer, args, kwargs)  # type: ignore[arg-type]
        listener.prefill.enter(index, call)
        return (call.hidden,), call.arguments

    def _fill_rows(self, width: int, layer: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
        is_own = self._own(args, rest[0] if len(rest) == 2 else None) is not None
        return _behind_zeros(rest[-1], width) if is_own else None

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """The listener, if this call carries the cache."""
        cache, arguments = self._cache(), (*args, *(kwargs or {}).values())
        carries = cache is not None and any(value is cache for value in arguments)
        return self._listener() if carries else None


@torch.compiler.disable
def _refuse_compiled() -> None:
    raise ConfigError(
        "the prefill came from compiled code, which this cache cannot enter, but only decoding steps are expected to "
        "be compiled. Call the model itself for the prompt; with generate leave prefill_chunk_size out, or pass "
        "disable_compile=True."
    )


def _without_cache() -> ForwardHooks:
    hooks = ForwardHooks.__new__(ForwardHooks)
    hooks._cache, hooks._is_inside = lambda: None, False
    return hooks


def hears_forwards(hook: Any) -> bool:
    """Whether a hook is that by which a living cache hears of its model's forwards; it goes with the cache."""
    return getattr(hook, "__func__", None) is ForwardHooks._model_begins


def callable_as(model: nn.Module) -> list[nn.Module]:
    """The modules one of which is called when a model is: PEFT's `generate` calls the model that it wraps."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    return [model] if inside is model else [model, inside]


def _behind_zeros(output: Any, tokens: int) -> Any:
    """A layer's output with rows of zeros in front, so that there are `tokens`; the last rows are those asked for."""
    if isinstance(output, tuple):
        return (_behind_zeros(output[0], tokens), *output[1:])
    return nn.functional.pad(output, (0, 0, tokens - output.shape[1], 0))


def _remove(*groups: list[RemovableHandle]) -> None:
    for group in groups:
        while group:
            group.pop().remove()


def _is_followed(handle: RemovableHandle) -> bool:
    hooks = handle.hooks_dict_ref() or ()
    return handle.id in hooks and next(reversed(hooks)) != handle.id
