# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entering a stock model for one forward, and leaving it as it was, after an exception too.

Hooks are registered when a blended forward begins and removed when its last layer is done. They carry no state: each
looks for its own cache among the arguments and does nothing without it, so plain calls and other caches pass through.
A hook that ends while another thread's call is about to run it is called by torch without its keyword arguments.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from .anatomy import LayerCall, wants_all_rows


class Guest(Protocol):
    """What enters: the cache of a request."""

    def forward_begins(self, arguments: dict[str, Any]) -> None:
        """The model is called with these keyword arguments."""

    def layer_begins(self, index: int, call: LayerCall) -> LayerCall:
        """A decoder layer is called; gives back the call that shall run."""

    def layer_ends(self, index: int, output: Any) -> Any:
        """A decoder layer is done; gives back the output that the model shall see, None for the layer's own."""

    def forward_ends(self, failed: bool = False) -> None:
        """The last layer is done, or an exception passed through."""


class Entry:
    """The hooks of one guest in one model."""

    def __init__(self, guest: Guest, model: nn.Module, layers: list[nn.Module]) -> None:
        self._tokens = 0  # of the call that is watched
        self._guest = weakref.ref(guest)
        self._model, self._layers = model, layers
        self._outer: list[tuple[nn.Module, RemovableHandle]] = []
        self._inner: list[tuple[nn.Module, RemovableHandle]] = []
        self._raising: nn.Module | None = None
        self._finalizer = weakref.finalize(guest, _remove, None, self._outer, self._inner)
        self._finalizer.atexit = False

    def watch_model(self) -> None:
        """See the next call of the model, to learn its ids."""
        if not self._outer:
            before = self._model.register_forward_pre_hook(self._model_begins, with_kwargs=True)
            after = self._model.register_forward_hook(self._ended, with_kwargs=True, always_call=True)
            self._outer += [(self._model, before), (self._model, after)]

    def enter_layers(self) -> None:
        """Stand before and behind every decoder layer."""
        if self._inner:
            return
        for index, layer in enumerate(self._layers):
            after = layer.register_forward_hook(self._layer_ended(index), with_kwargs=True, always_call=True)
            before = layer.register_forward_pre_hook(self._layer_hook(index, after), with_kwargs=True)
            self._inner += [(layer, before), (layer, after)]

    def leave(self, watching: bool = False) -> None:
        """Remove every hook.

        Args:
            watching: keep those on the model, because more of the same prompt is to come.
        """
        _remove(self._raising, self._inner)
        if not watching:
            _remove(self._raising, self._outer)

    def _model_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        guest = self._own(args, kwargs)
        if guest is not None and kwargs is not None:
            _stand_last(module, *(handle for _, handle in self._outer))
            names = ("input_ids", "attention_mask")
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            self._tokens = 0 if arguments.get("input_ids") is None else arguments["input_ids"].shape[1]
            guest.forward_begins(arguments)

    def _layer_hook(self, index: int, after: RemovableHandle) -> Callable[..., Any]:
        def begins(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
            guest = self._own(args, kwargs)
            if guest is None or kwargs is None:
                return None
            _stand_last(layer, after)
            return guest.layer_begins(index, LayerCall.bind(layer, args, kwargs)).as_hook_result()

        return begins

    def _layer_ended(self, index: int) -> Callable[..., Any]:
        def ended(layer: nn.Module, args: tuple[Any, ...], *rest: Any) -> Any:
            output, is_last = rest[-1], index == len(self._layers) - 1
            guest = self._own(args, rest[0] if len(rest) == 2 else None)
            if guest is not None and output is not None and not is_last:
                return guest.layer_ends(index, output)
            if output is None or is_last:
                self._ended(layer, args, *rest)
            if guest is not None and is_last and output is not None and self._tokens and wants_all_rows(self._model):
                return _behind_zeros(output, self._tokens)
            return None

        return ended

    def _ended(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs, output = rest if len(rest) == 2 else (None, *rest)
        guest = self._own(args, kwargs)
        if guest is not None:
            self._raising = module if output is None else None
            guest.forward_ends(failed=output is None)
            self._raising = None

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Guest | None:
        """The guest, if it is the cache that this call was given."""
        guest = self._guest()
        given = (*args, *(kwargs or {}).values())
        return guest if guest is not None and any(value is guest for value in given) else None


def _behind_zeros(output: Any, tokens: int) -> Any:
    """A layer's output with rows of zeros in front, so that there are `tokens`; the last rows are those asked for."""
    if isinstance(output, tuple):
        return (_behind_zeros(output[0], tokens), *output[1:])
    return nn.functional.pad(output, (0, 0, tokens - output.shape[1], 0))


def _stand_last(module: nn.Module, *handles: RemovableHandle) -> None:
    """Be called behind all other hooks: after an exception torch walks along them, and only the last may go then."""
    for handle in handles:
        if handle.id in module._forward_hooks:
            module._forward_hooks.move_to_end(handle.id)


def _remove(raising: nn.Module | None, *groups: list[tuple[nn.Module, RemovableHandle]]) -> None:
    """Remove hooks, but none from the midst of those along which torch walks; that one goes with the next removal."""
    for group in groups:
        staying = [entry for entry in group if entry[0] is raising and _is_followed(*entry)]
        while group:
            entry = group.pop()
            if entry not in staying:
                entry[1].remove()
        group.extend(staying)


def _is_followed(module: nn.Module, handle: RemovableHandle) -> bool:
    hooks = module._forward_hooks
    return handle.id in hooks and next(reversed(hooks)) != handle.id
