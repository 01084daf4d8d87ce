# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who computed the K and V that a cache holds: they belong to the model as it was then.

A model object may be another model at its next turn: an adapter is switched, weights are written in place, the dtype
or the attention changes. So a cache notes the author of what it holds, and compares it once where a turn begins.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from .anatomy import text_config
from .fingerprint import identity_of
from .identity.canonical import DEVICE_TYPES


class Author(NamedTuple):
    """A model at one moment, as far as the K and V depend on it that it computes in this process.

    Attributes:
        fingerprint: weights, adapter, dtype, structure and code; see `fingerprint`.
        attention: the name of the attention implementation, which a fingerprint leaves out.
        dtype: of the model.
        autocast: the dtype of `torch.autocast` where it was on; else empty.
    """

    fingerprint: str
    attention: str
    dtype: str
    autocast: str

    @property
    def form(self) -> tuple[str, str]:
        """What the dtypes of K and V depend on."""
        return self.dtype, self.autocast

    def stored_name(self) -> str:
        """The fingerprint under which what it computed may be saved.

        Raises:
            ConfigError: it computed under autocast, which no fingerprint names.
        """
        if self.autocast:
            raise ConfigError(
                f"the K and V of this cache were computed under torch.autocast ({self.autocast}), but what is saved "
                "is expected to be what the model computes by itself. Prefill outside the autocast block."
            )
        return self.fingerprint

    def difference(self, other: "Author") -> str:
        """What this author has that another one had not, in words."""
        names = ("dtype", "attention", "autocast")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        words = [f"the {name} {mine!r} instead of {others!r}" for name, mine, others in pairs if mine != others]
        return ", ".join(words) or "another adapter, other weights or other code"


def author_of(model: nn.Module) -> Author:
    """Say who a model is now; as dear as `fingerprint`.

    Raises:
        UnsupportedModelError: a forward hook of others was put into the model.
    """
    device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    is_cast = device in DEVICE_TYPES and torch.is_autocast_enabled(device)
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_cast else ""
    attention = getattr(text_config(model), "_attn_implementation", None) or ""
    return Author(identity_of(model), attention, dtype, autocast)


def refuse_other_author(author: Author | None, now: Author, tokens: int, do: str) -> None:
    """Refuse to continue so many tokens whose author the model no longer is; None: it is not known."""
    if author not in (None, now):
        raise ConfigError(
            f"{tokens} tokens whose K and V are held were computed by another model than the one that is expected to "
            f"continue them: now it has {now.difference(author)}. {do}"
        )
