# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The number of past tokens, for attention code that finds out from it where its rows stand.

Llama 4 scales the queries of its unrotated layers by their places, which it takes for 0, 1, 2 … behind the past
tokens. Where only some rows flow they stand elsewhere, so the number that it is given knows better: added to such a
count it gives the rows' own places. To everybody else it is a number.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

ADDING = ("add", "__add__", "__radd__")


class PastTokens(int):
    """How many tokens stand before the new ones, of which only some flow."""

    columns: Tensor

    @classmethod
    def before(cls, past: int, columns: Tensor) -> "PastTokens":
        """The number `past`, for rows at some columns.

        Shapes: columns `[batch, rows]`.
        """
        number = cls(past)
        number.columns = columns
        return number

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Give places where the number is added to a count of the rows; be a number elsewhere."""
        number = next((value for value in args if isinstance(value, cls)), None)
        if number is not None and getattr(func, "__name__", "") in ADDING:
            others = [value for value in args if value is not number]
            if len(others) == 1 and number._is_count(others[0]):
                return number._places(others[0].device)
        plain = [int(value) if isinstance(value, cls) else value for value in args]
        named = {name: int(value) if isinstance(value, cls) else value for name, value in (kwargs or {}).items()}
        return func(*plain, **named)

    def _is_count(self, value: Any) -> bool:
        rows = self.columns.shape[1]
        return (
            isinstance(value, Tensor)
            and value.shape == (rows,)
            and not value.is_floating_point()
            and torch.equal(value, torch.arange(rows, device=value.device))
        )

    def _places(self, device: torch.device) -> Tensor:
        """`[rows]`; `[batch, rows]` where the entries of a batch differ."""
        places = self.columns.to(device) + int(self)
        return places[0] if bool((places == places[:1]).all()) else places.as_subclass(PlacesByEntry)


class PlacesByEntry(Tensor):
    """Places `[batch, rows]` that may be shaped as if they were those of one entry."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keep the batch where one entry is asked for; what comes out of that is a plain tensor."""
        if func in (Tensor.view, Tensor.reshape):
            shape = args[1] if isinstance(args[1], tuple | list) else args[1:]
            plain = args[0].as_subclass(Tensor)
            return plain.view(plain.shape[0], *shape[1:]) if shape[0] == 1 else plain.view(*shape)
        return super().__torch_function__(func, types, args, kwargs or {})
