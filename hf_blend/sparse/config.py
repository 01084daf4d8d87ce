# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of sparse decoding."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..config import Options
from ..errors import ConfigError, suggest

MOST_STEP_TOKENS = 64  # a forward with more new tokens is a prefill, and sees everything
AUTO_TOKENS = 16384  # the shortest context where a quarter of the blocks was clearly faster with every shape measured


@dataclass(frozen=True)
class SparseConfig:
    """How many blocks a decoding step looks at, and how long a selection holds."""

    share: float = 0.25  # of a context's blocks that a step looks at, above 0 up to 1; 1 is dense, bit for bit
    block_tokens: int = 64
    method: str = "gsa"  # of `hf_blend.sparse.methods`, or a file with one, which scores blocks
    method_options: Mapping[str, Any] = field(default_factory=Options)
    first_blocks: int = 1  # that are always looked at
    recent_blocks: int = 2  # complete ones at the end that are always looked at; the unfinished one is, too
    min_tokens: int = 2048  # contexts shorter than this are dense
    lock: bool = True  # hold a selection; False selects in every step
    checkpoint_interval: int = 8  # steps after which a held selection is compared with a new one
    update_threshold: int = 2  # it is kept if at most so many blocks are in one of the two and not in the other
    lock_duration: int = 16  # steps after which a selection is dropped, however well it compares

    def __post_init__(self) -> None:
        object.__setattr__(self, "method_options", Options(self.method_options))
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}, expected a number above 0 and up to 1. Try 0.25.")
        may_be_zero = ("first_blocks", "recent_blocks", "min_tokens", "update_threshold")
        for name in ("block_tokens", "checkpoint_interval", "lock_duration", *may_be_zero):
            value, least = getattr(self, name), 0 if name in may_be_zero else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on.")


def parsed(sparse: float | str | Mapping[str, Any] | SparseConfig) -> SparseConfig:
    """Make a config of what `blended(sparse=...)` takes: a share, settings by name, or "auto"."""
    if isinstance(sparse, SparseConfig):
        return sparse
    if isinstance(sparse, str):
        if sparse != "auto":
            raise ConfigError(f'sparse is {sparse!r}, expected "auto", a share such as 0.25, or settings by name.')
        return SparseConfig(min_tokens=AUTO_TOKENS)
    settings = sparse if isinstance(sparse, Mapping) else {"share": sparse}
    config: SparseConfig = from_settings(SparseConfig, settings, "sparse")
    return config


def from_settings(config: Any, settings: Mapping[str, Any], argument: str) -> Any:
    """Make a config, of a dataclass, from the settings in an argument of that name; an unknown one is refused."""
    names = [entry.name for entry in fields(config)]
    for name in settings:
        if name not in names:
            raise ConfigError(f"{argument} has the unknown setting {name!r}. {suggest(str(name), names)}")
    return config(**settings)
