# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Handing a stock model other arguments in the calls that carry a certain cache, and leaving it untouched."""

import inspect
import weakref
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle


class SequenceSteering(Protocol):
    """What steers: a cache."""

    def forward_begins(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The model is called with these arguments, by name; gives back those that shall be used."""

    def forward_ends(self) -> None:
        """The call is over, or an exception passed through."""


class SequenceHooks:
    """The hooks of one cache on one model. They hold no reference to the cache and go with it."""

    def __init__(self, pilot: SequenceSteering, model: nn.Module) -> None:
        self._pilot, self._model = weakref.ref(pilot), model
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._handles: list[RemovableHandle] = []
        self._stays = False
        weakref.finalize(pilot, _remove, self._handles).atexit = False

    def watch(self, stay: bool = False) -> None:
        """Steer the next call that carries the cache; with `stay`, every call until `leave`."""
        self._stays = self._stays or stay
        if not self._handles:
            self._handles += [
                self._model.register_forward_pre_hook(self._begins, with_kwargs=True),
                self._model.register_forward_hook(self._ended, with_kwargs=True, always_call=True),
            ]

    def leave(self) -> None:
        """Remove the hooks."""
        self._stays = False
        _remove(self._handles)

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        pilot = self._own(args, kwargs)
        if pilot is None or kwargs is None:
            return None
        return (), pilot.forward_begins({**dict(zip(self._names, args, strict=False)), **kwargs})

    def _ended(self, model: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        pilot = self._own(args, rest[0] if len(rest) == 2 else None)
        if pilot is not None:
            pilot.forward_ends()
            if not self._stays:
                _remove(self._handles)

    def _own(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> SequenceSteering | None:
        """The cache, if this call carries it."""
        pilot = self._pilot()
        given = (*args, *(kwargs or {}).values())
        return pilot if pilot is not None and any(value is pilot for value in given) else None


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
