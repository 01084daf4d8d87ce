# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The author of the K and V in a cache: the model as it was when it computed them.

Between two turns a model may change: an adapter is switched, weights are written in place, the dtype or the attention
changes. So a cache records the author of its K and V, and compares it where a turn begins.
"""

from typing import NamedTuple

import torch
from torch import nn

from ..errors import ConfigError
from .anatomy import text_config
from .fingerprint import identity_of
from .identity.canonical import DEVICE_TYPES


class Author(NamedTuple):
    """A model at one moment: all that its K and V depend on in this process.

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
        """Two authors with one form compute K and V of the same dtypes."""
        return self.dtype, self.autocast

    def stored_name(self) -> str:
        """The fingerprint, under which its K and V may be saved.

        Raises:
            ConfigError: they were computed under autocast, which no fingerprint names.
        """
        if self.autocast:
            raise ConfigError(
                f"the K and V of this cache were computed under torch.autocast ({self.autocast}), but what is saved "
                "is expected to be what the model computes by itself. Prefill outside the autocast block."
            )
        return self.fingerprint

    def difference(self, other: "Author") -> str:
        """In words, how this author differs from another one."""
        names = ("dtype", "attention", "autocast")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        words = [f"the {name} {mine!r} instead of {others!r}" for name, mine, others in pairs if mine != others]
        return ", ".join(words) or "another adapter, other weights or other code"


def author_of(model: nn.Module) -> Author:
    """The author of what a model computes now; costs as much as `fingerprint`.

    Raises:
        UnsupportedModelError: a forward hook of others was put into the model.
    """
    device, dtype = model.device.type, str(model.dtype).removeprefix("torch.")
    is_cast = device in DEVICE_TYPES and torch.is_autocast_enabled(device)
    autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.") if is_cast else ""
    attention = getattr(text_config(model), "_attn_implementation", None) or ""
    return Author(identity_of(model), attention, dtype, autocast)


def refuse_other_author(author: Author | None, now: Author, tokens: int, do: str) -> None:
    """Refuse to continue `tokens` whose author is not the model as it is now; `author` is None where it is unknown."""
    if author not in (None, now):
        raise ConfigError(
            f"{tokens} tokens whose K and V are held were computed by another model than the one that is expected to "
            f"continue them: now it has {now.difference(author)}. {do}"
        )
