# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Mixers: linear attention, state spaces and convolutions, entered through their projections.

A mixer needs every token in order, but only through what its input projections make of each token alone. That is per
token, carries no position, and can be stored like K and V. So a mixer runs over all tokens with hidden states at the
active rows only: each projection is computed for these rows, what is stored stands in for the outputs of the others,
convolution and scan see all tokens, and the rows of the output are taken again. The module's code is the model's own.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..model.anatomy import Spans, gather_rows, parameter_names

Reach = Callable[[], None]
WriteStored = Callable[[Tensor, Spans], None]


@dataclass(frozen=True)
class Projection:
    """A linear module inside a mixer whose output at a token depends on that token alone, or affects it alone."""

    module: nn.Module
    features: int
    spans: tuple[tuple[slice, slice], ...]

    @cached_property
    def width(self) -> int:
        """How many of its columns are stored; 0 where none affects another token."""
        return sum(stored.stop - stored.start for _, stored in self.spans)

    @cached_property
    def gaps(self) -> list[slice]:
        """The other columns: they affect no other token."""
        others = set(range(self.features))
        for columns, _ in self.spans:
            others -= set(range(self.features)[columns])
        return regular(sorted(others))


@dataclass(frozen=True)
class Mixer:
    """The mixer of a decoder layer."""

    module: nn.Module
    projections: tuple[Projection, ...]
    width: int
    full_width: int = 0

    @property
    def stored(self) -> int:
        """Number of projections of which something is stored."""
        return sum(projection.width > 0 for projection in self.projections)

    def record(self, cache: Any, tokens: int) -> "MixerPass":
        """Note what is stored of the projections of all tokens in calls with this cache."""
        return MixerPass(self, cache, ActiveRows(None, tokens))


@dataclass
class ActiveRows:
    """The rows of a forward in which a mixer's projections are computed.

    Attributes:
        columns: of the rows, `[batch, rows]`; None: all tokens are computed.
        tokens: how many there are.
        full: arguments of the layer that have the rows alone, each beside that of all tokens.
        padding: where there is padding, `[batch, tokens]`; None: nowhere.
    """

    columns: Tensor | None
    tokens: int
    full: Sequence[tuple[Any, Any]] = ()
    padding: Tensor | None = None

    def take(self, states: Tensor) -> Tensor:
        """The rows of `[batch, tokens, width]`; behind them one padding column of each entry, if there is padding."""
        index = self._columns_on(states.device)
        if self.padding is not None:
            padding = self.padding.to(states.device).to(torch.uint8).argmax(dim=1, keepdim=True)
            index = torch.cat((index, padding), dim=1)
        return gather_rows(states, index)

    def write(self, full: Tensor, rows: Tensor) -> None:
        """Write what `take` gave, after a projection, to its columns of `[batch, tokens, width]`."""
        if self.padding is not None:
            padding = self.padding.to(full.device)[..., None]
            full.copy_(torch.where(padding, rows[:, -1:], full))
            rows = rows[:, :-1]
        self._write(full, rows)

    def spread(self, rows: Tensor) -> Tensor:
        """`[batch, rows, width]` at their columns of `[batch, tokens, width]`, 0 elsewhere."""
        full = rows.new_zeros(rows.shape[0], self.tokens, rows.shape[-1])
        self._write(full, rows)
        return full

    def _write(self, full: Tensor, rows: Tensor) -> None:
        columns = self._columns_on(full.device)
        if columns.shape[0] == 1:
            full.index_copy_(1, columns[0], rows)
        else:
            full.scatter_(1, columns[..., None].expand_as(rows), rows)

    def _columns_on(self, device: torch.device) -> Tensor:
        return self.columns.to(device)  # type: ignore[union-attr]


class MixerPass:
    """The hooks of one forward in one mixer; they see the calls of this thread that are given this cache."""

    def __init__(
        self,
        mixer: Mixer,
        cache: Any,
        rows: ActiveRows,
        write_stored: WriteStored | None = None,
        reached: Reach | None = None,
        keeps: bool = True,
    ) -> None:
        """Prepare; nothing is entered before `enter`."""
        self.rows = rows
        self.states: Tensor | None = None  # what is stored of the projections, `[batch, tokens, width]`
        self._mixer = mixer
        self._cache = cache
        self._write_stored = write_stored
        self._reached = reached
        self._keeps = keeps
        self._missing = mixer.stored  # projections that have not come
        self._thread = threading.get_ident()
        self._is_inside = False  # a call of the mixer with this cache runs
        self._has_rows = False  # the projection that runs was given the active rows
        self._handles: list[RemovableHandle] = []

    def enter(self) -> None:
        """Put the hooks in."""
        module = self._mixer.module
        self._handles.append(module.register_forward_pre_hook(self._begins, with_kwargs=True))
        for projection in self._mixer.projections:
            self._handles.append(projection.module.register_forward_pre_hook(self._select_rows))
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
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        full = {name: self._full(value) for name, value in arguments.items()}
        full[names[0]] = self.rows.spread(arguments[names[0]])
        return (), full

    def _full(self, value: Any) -> Any:
        """An argument for all tokens in the place of one for the active rows."""
        for of_rows, of_all in self.rows.full:
            if of_rows is value:
                return of_all
        if isinstance(value, tuple | list):
            return type(value)(self._full(item) for item in value)
        return value

    def _select_rows(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        """Give a projection the active rows."""
        if threading.get_ident() != self._thread:
            return None
        self._has_rows = self._is_inside and args[0].shape[1] == self.rows.tokens
        if not self._has_rows or self.rows.columns is None:
            return None
        return (self.rows.take(args[0]), *args[1:])

    def _projected(self, projection: Projection, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        """Remember what is stored of the output, and put it back to the columns of all tokens."""
        if not self._has_rows or not self._is_own_call():
            return None
        if projection.width:
            if self._keeps:
                self._keep(projection, output)
            self._missing -= 1
            if not self._missing and self._reached is not None:
                with self._kept_apart():
                    self._reached()
        return None if self.rows.columns is None else self._spread(projection, output)

    @contextmanager
    def _kept_apart(self) -> Iterator[None]:
        """Keep the state of this pass while stored ones are read: damaged ones are computed through these hooks."""
        before = self._is_inside, self._has_rows, self._missing
        try:
            yield
        finally:
            self._is_inside, self._has_rows, self._missing = before

    def _write_apart(self, states: Tensor, spans: Spans) -> None:
        with self._kept_apart():
            self._write_stored(states, spans)  # type: ignore[misc]

    def _keep(self, projection: Projection, output: Tensor) -> None:
        """Write what is stored of the rows' output to the states."""
        if self.states is None:
            self.states = output.new_empty(output.shape[0], self.rows.tokens, self._mixer.width)
            if self.rows.columns is not None and self._write_stored is not None:
                every = slice(0, self._mixer.width)
                self._write_apart(self.states, ((every, every),))
        for columns, stored in projection.spans:
            if self.rows.columns is None:
                self.states[..., stored] = output[..., columns]
            else:
                self.rows.write(self.states[..., stored], output[..., columns])

    def _spread(self, projection: Projection, output: Tensor) -> Tensor:
        """A projection's output for all tokens; columns that affect no other token are 0 where not computed."""
        full = output.new_empty(output.shape[0], self.rows.tokens, projection.features)
        for gap in projection.gaps:
            full[..., gap] = 0
        if self.states is not None:
            for columns, stored in projection.spans:
                full[..., columns] = self.states[..., stored]
        elif self._write_stored is not None and projection.spans:
            self._write_apart(full, projection.spans)
        self.rows.write(full, output)
        return full

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


def regular(columns: Sequence[int]) -> list[slice]:
    """Cut increasing numbers into slices of equal steps: neighbours, or every n-th where gates lie between."""
    parts: list[slice] = []
    for column in columns:
        last = parts[-1] if parts else None
        if last is not None and last.stop == last.start + 1:  # one number alone
            parts[-1] = slice(last.start, column + 1, column - last.start)
        elif last is not None and column == last.stop - 1 + last.step:
            parts[-1] = slice(last.start, column + 1, last.step)
        else:
            parts.append(slice(column, column + 1, 1))
    return parts


def full_arguments(of_rows: Mapping[str, Any], of_all: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The arguments of a layer that have its active rows alone, each beside that of all tokens."""
    pairs = []
    for name, value in of_rows.items():
        other = of_all.get(name)
        if value is other or value is None:  # other arguments are None, too
            continue
        pairs.append((value, other))
        if isinstance(value, tuple | list) and isinstance(other, Sequence):
            pairs.extend(zip(value, other, strict=False))
    return pairs
