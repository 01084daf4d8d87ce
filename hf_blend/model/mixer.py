# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixers: linear attention, state spaces and convolutions, entered through their projections.

A mixer needs every token in order, but only through what its input projections make of each token alone. That is per
token, carries no position, and can be stored like K and V. So a mixer runs over all tokens with hidden states at the
active rows only: each projection is computed for these rows, what is stored stands in for the outputs of the others,
convolution and scan see all tokens, and the rows of the output are taken again. The module's code is the model's own.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .anatomy import gather_rows, parameter_names

Reach = Callable[[], None]


@dataclass(frozen=True)
class Projection:
    """A linear module inside a mixer whose output at a token depends on that token alone, or is felt by it alone.

    Attributes:
        module: the module.
        columns: `[width]`, the columns of its output that another token can feel: these are stored; None for all.
        start: the first of them among all that is stored of the mixer.
        width: how many they are; 0 where no other token feels any.
    """

    module: nn.Module
    columns: Tensor | None
    start: int
    width: int

    @property
    def span(self) -> slice:
        """Its columns among those stored of the mixer."""
        return slice(self.start, self.start + self.width)


@dataclass(frozen=True)
class Mixer:
    """The mixer of a decoder layer.

    Attributes:
        module: it is called once in each forward of the layer, with the cache.
        projections: computed for the active rows only.
        width: how many numbers are stored per token.
    """

    module: nn.Module
    projections: tuple[Projection, ...]
    width: int

    @property
    def stored(self) -> int:
        """How many projections have something stored."""
        return sum(projection.width > 0 for projection in self.projections)


@dataclass
class ActiveRows:
    """The rows of a forward in which a mixer's projections are computed.

    Attributes:
        columns: `[batch, rows]`, where they are among the tokens; None: all tokens.
        tokens: how many tokens there are.
        whole: `id` of a cut argument → the argument for all tokens; the mixer is given that one.
        padding: `[batch, tokens]`, True on padding; None: none.
    """

    columns: Tensor | None
    tokens: int
    whole: Mapping[int, Any]
    padding: Tensor | None = None

    def take(self, states: Tensor) -> Tensor:
        """The rows of `[batch, tokens, width]`; behind them one padding column of each entry, if there is padding."""
        index = self._columns_on(states.device)
        if self.padding is not None:
            padding = self.padding.to(states.device).to(torch.uint8).argmax(dim=1, keepdim=True)
            index = torch.cat((index, padding), dim=1)
        return gather_rows(states, index)

    def write(self, whole: Tensor, rows: Tensor) -> None:
        """Write what `take` gave, after a projection, to its columns of `[batch, tokens, width]`."""
        columns = self._columns_on(whole.device)
        if self.padding is not None:
            padding = self.padding.to(whole.device)[..., None]
            whole.copy_(torch.where(padding, rows[:, -1:], whole))
            rows = rows[:, :-1]
        if columns.shape[0] == 1:
            whole.index_copy_(1, columns[0], rows)
        else:
            whole.scatter_(1, columns[..., None].expand_as(rows), rows)

    def spread(self, rows: Tensor) -> Tensor:
        """`[batch, rows, width]` at their columns of `[batch, tokens, width]`, 0 elsewhere."""
        whole = rows.new_zeros(rows.shape[0], self.tokens, rows.shape[-1])
        return whole.scatter_(1, self._columns_on(rows.device)[..., None].expand_as(rows), rows)

    def _columns_on(self, device: torch.device) -> Tensor:
        return self.columns.to(device)  # type: ignore[union-attr]


class MixerPass:
    """The hooks of one forward in one mixer; they see the calls of this thread that are given this cache.

    Attributes:
        states: `[batch, tokens, width]`, what is stored: of the active rows as computed, of others as it was given;
            made by the first projection where it is None.
    """

    def __init__(
        self,
        mixer: Mixer,
        cache: Any,
        rows: ActiveRows,
        states: Tensor | None = None,
        make: Callable[[Tensor], Tensor] | None = None,
        reached: Reach | None = None,
    ) -> None:
        """Prepare; nothing is entered before `enter`.

        Args:
            mixer: which mixer.
            cache: of the forward; other calls of the module are let through.
            rows: the active rows.
            states: what stands in for the projections of the other rows.
            make: makes these states from the first output of a projection, `[batch, rows, features]`.
            reached: is called when the last of what is stored has been computed; may raise.
        """
        self._mixer, self._cache, self.rows, self.states = mixer, cache, rows, states
        self._make, self._reached, self._missing = make, reached, mixer.stored
        self._thread, self._is_inside, self._is_taken = threading.get_ident(), False, False
        self._handles: list[RemovableHandle] = []

    def enter(self) -> None:
        """Put the hooks in."""
        module = self._mixer.module
        self._handles.append(module.register_forward_pre_hook(self._begins, with_kwargs=True))
        for projection in self._mixer.projections:
            self._handles.append(projection.module.register_forward_pre_hook(self._take))
            self._handles.append(projection.module.register_forward_hook(partial(self._projected, projection)))
        self._handles.append(module.register_forward_hook(self._ends))

    def leave(self) -> None:
        """Take the hooks out."""
        while self._handles:
            self._handles.pop().remove()

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the mixer arguments for all tokens."""
        if threading.get_ident() != self._thread:
            return None
        self._is_inside = any(value is self._cache for value in (*args, *kwargs.values()))
        self._missing = self._mixer.stored
        if self.rows.columns is None or not self._is_inside:
            return None
        names = parameter_names(type(module))  # type: ignore[arg-type]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        whole = {name: self._whole(value) for name, value in given.items()}
        whole[names[0]] = self.rows.spread(given[names[0]])
        return (), whole

    def _whole(self, value: Any) -> Any:
        if id(value) in self.rows.whole:
            return self.rows.whole[id(value)]
        if isinstance(value, tuple | list):
            return type(value)(self._whole(item) for item in value)
        return value

    def _take(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        self._is_taken = self._is_own_call() and args[0].shape[1] == self.rows.tokens
        return (self.rows.take(args[0]), *args[1:]) if self._is_taken and self.rows.columns is not None else None

    def _projected(self, projection: Projection, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        """Remember what is stored of the output, and put it back to the columns of all tokens."""
        if not self._is_taken or not self._is_own_call():
            return None
        if self.states is None and projection.width:
            self.states = output.new_zeros(output.shape[0], self.rows.tokens, self._mixer.width)
            self.states = self.states if self._make is None else self._make(self.states)
        felt = output if projection.columns is None else output[..., projection.columns]
        whole = output if self.rows.columns is None else self._spread(projection, output, felt)
        if projection.width:
            if self.rows.columns is None:
                self.states[..., projection.span] = felt  # type: ignore[index]
            self._missing -= 1
            if not self._missing and self._reached is not None:
                self._reached()
        return None if self.rows.columns is None else whole

    def _spread(self, projection: Projection, output: Tensor, felt: Tensor) -> Tensor:
        """A projection's output for all tokens; columns that no other token feels are 0 at those not computed."""
        if not projection.width:
            whole = output.new_zeros(output.shape[0], self.rows.tokens, output.shape[-1])
            self.rows.write(whole, output)
            return whole
        states = self.states[..., projection.span]  # type: ignore[index]
        self.rows.write(states, felt)
        if projection.columns is None:
            return states.clone()  # the module may write to what it is given
        whole = output.new_zeros(output.shape[0], self.rows.tokens, output.shape[-1])
        whole[..., projection.columns] = states
        self.rows.write(whole, output)
        return whole

    def _ends(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Take the active rows of the mixer's output."""
        if not self._is_own_call():
            return None
        self._is_inside = False
        if self.rows.columns is None:
            return None
        return tuple(map(self._row_outputs, output)) if isinstance(output, tuple) else self._row_outputs(output)

    def _row_outputs(self, output: Any) -> Any:
        is_per_token = isinstance(output, Tensor) and output.dim() == 3 and output.shape[1] == self.rows.tokens
        return gather_rows(output, self.rows.columns) if is_per_token else output

    def _is_own_call(self) -> bool:
        return self._is_inside and threading.get_ident() == self._thread


def whole_arguments(cut: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[int, Any]:
    """By the `id` of what a layer is given for its active rows, what it would be given for all tokens.

    Args:
        cut: the layer's arguments for the active rows; they must outlive the result, or ids would be used again.
        whole: for all tokens.
    """
    found: dict[int, Any] = {}
    for name, value in cut.items():
        if value is not whole.get(name):
            found[id(value)] = whole.get(name)
            if isinstance(value, tuple | list) and isinstance(whole.get(name), Sequence):
                found.update({id(item): other for item, other in zip(value, whole[name], strict=False)})
    return found
