# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The settings of a blend: one frozen dataclass that checks itself and round-trips through JSON."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any

from .errors import ConfigError, suggest

EDITS = ("compute", "blend")  # what becomes of cached tokens behind the first one that a prompt has otherwise


class Options(Mapping[str, Any]):
    """A mapping that cannot change: JSON values, with lists kept as tuples. Hashable, equal to an equal dict."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._items = {
            _instance("the name of an option", name, str): _frozen(value) for name, value in (options or {}).items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def check_kv_bits(kv_bits: int | None) -> None:
    """Refuse what is no number of bits in which K and V can be held."""
    if kv_bits is not None and (type(kv_bits) is not int or kv_bits not in (4, 8)):
        raise ConfigError(f"kv_bits is {kv_bits!r}, but 8, 4 or None is expected. Leave it out for none.")


@dataclass(frozen=True)
class BlendConfig:
    """How much of the reused KV is recomputed, and which tokens those are.

    Attributes:
        recompute_ratio: share of the reusable tokens that is recomputed, 0–1. Half of the default is about twice as
            fast and leaves more of the error, see docs/choosing.md.
        selector: the rule that chooses them: a name, see docs/rules.md, or a path to a file with a selector.
        selector_options: its options, by name.
        check_layer: layer at which tokens are chosen, 1 or higher; layers before it compute all tokens.
            Selectors that do not compare fresh and stored KV, such as the default, choose before layer 0.
        chunk_prefix_ids: tokens before each chunk while it is computed; None is `ChunkStore.default_prefix`. If
            there is no tokenizer, it is the prefix of stored chunks, see docs/choosing.md.
        edits: what happens after the first token where prompt and cache differ: "compute" everything, or "blend"
            (move and reuse what both have), see docs/chat.md.
        chains: store what `heal` computes, and load it as exact in later prompts that begin with the same tokens, see
            docs/healing.md.
        kv_bits: bits in which K and V are held, 8 or 4; None is the model's dtype.
        kv_device_map: where K and V are kept: "cpu", "disk", or layer → device, see docs/holding_less.md.
            With None, and for layers not named: where they are computed.
        offload_folder: for K and V on disk; its files vanish with the cache.
        allow_unverified: use a model that fails the self-test, with one warning.
        seed: for selectors that draw at random.
    """

    recompute_ratio: float = 0.3
    selector: str = "stored-importance"
    selector_options: Mapping[str, Any] = field(default_factory=Options)
    check_layer: int = 1
    chunk_prefix_ids: tuple[int, ...] | None = None
    edits: str = "compute"
    chains: bool = False
    kv_bits: int | None = None
    kv_device_map: str | Mapping[Any, int | str] | None = None
    offload_folder: str | None = None
    allow_unverified: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Bring each field to its type and refuse what makes no sense."""
        object.__setattr__(self, "recompute_ratio", _ratio("recompute_ratio", self.recompute_ratio))
        object.__setattr__(self, "selector_options", _options("selector_options", self.selector_options))
        if self.chunk_prefix_ids is not None:
            object.__setattr__(self, "chunk_prefix_ids", _integers("chunk_prefix_ids", self.chunk_prefix_ids))
        kinds = {"selector": str, "check_layer": int, "allow_unverified": bool, "seed": int}
        for name, kind in kinds.items():
            _instance(name, getattr(self, name), kind)
        check_kv_bits(self.kv_bits)
        if self.edits not in EDITS:
            raise ConfigError(f"edits is {self.edits!r}, expected one of {', '.join(EDITS)}. Leave it out to compute.")
        if self.check_layer < 1:
            raise ConfigError(
                f"check_layer is {self.check_layer}, expected a layer from 1 on: what layer 0 computes does not "
                "depend on the context, so nothing can be scored there. Try 1."
            )
        self._check_memory()

    def _check_memory(self) -> None:
        placed = self.kv_device_map
        if isinstance(placed, Mapping):
            object.__setattr__(self, "kv_device_map", Options({str(key): item for key, item in placed.items()}))
        elif placed not in (None, "cpu", "disk"):
            raise ConfigError(
                f'kv_device_map is {placed!r}, expected layer → device, such as {{4: "cpu", 5: "disk"}}, or "cpu" or '
                '"disk" for all layers.'
            )
        if self.offload_folder is not None:
            object.__setattr__(self, "offload_folder", os.fspath(self.offload_folder))
        self.device_map  # noqa: B018 (refuses what cannot be a layer or a device)

    @property
    def device_map(self) -> str | dict[int, int | str]:
        """`kv_device_map` with layers and GPUs as numbers; one name for all layers as it is."""
        placed = self.kv_device_map
        if not isinstance(placed, Mapping):
            return placed or {}
        devices: dict[int, int | str] = {}
        for layer, device in placed.items():
            if not str(layer).isdecimal() or isinstance(device, bool) or not isinstance(device, int | str):
                raise ConfigError(
                    f"kv_device_map has {layer!r}: {device!r}, expected the number of a layer and a device, such as "
                    '4: "cpu".'
                )
            devices[int(layer)] = _device_name(device)
        return devices

    def refuse_depth(self, num_layers: int) -> None:
        """Refuse a model that ends before the check layer (ConfigError)."""
        if self.check_layer >= num_layers:
            raise ConfigError(
                f"check_layer is {self.check_layer}, but the model has {num_layers} layers, 0 … {num_layers - 1}. "
                f"Give a check layer below {num_layers}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Give the fields as JSON values: tuples become lists."""
        return {entry.name: _thawed(getattr(self, entry.name)) for entry in fields(self)}

    def to_json(self) -> str:
        """Give the fields as one JSON document with sorted keys."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BlendConfig":
        """Build a config from what `to_dict` gave, or from part of it.

        Args:
            values: field name → value; fields that are left out keep their defaults.

        Returns:
            The config.

        Raises:
            ConfigError: a name is unknown or a value is refused.
        """
        names = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(f"BlendConfig has no field {name!r}. {suggest(str(name), names)}")
        return cls(**values)


def _device_name(device: int | str) -> int | str:
    """A device as accelerate names it: GPUs by number."""
    text = str(device).removeprefix("cuda:")
    return int(text) if text.isdecimal() else str(device)


def _instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{name} is {value!r}, a {type(value).__name__}. Give a {kind.__name__}.")
    return value


def _ratio(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:  # also refuses NaN
        raise ConfigError(f"{name} is {value!r}, but a share of the tokens, 0 … 1, is expected. 15 % is 0.15.")
    return float(value)


def _integers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}, but several numbers are expected. Give a tuple, even of one: (1,).")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, Integral) or item < 0:
            raise ConfigError(
                f"{name} holds {item!r}, but whole numbers from 0 on are expected. Correct it: {value!r}."
            )
    return tuple(map(int, value))


def _options(name: str, value: Any) -> Options:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}, but names with values are expected. Give a dict, or leave it out.")
    return Options(value)


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Options(value)
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if not isinstance(value, str | int | float | NoneType) or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"an option is {value!r}, a {type(value).__name__}. Give what JSON can hold.")
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _thawed(item) for name, item in value.items()}
    return [_thawed(item) for item in value] if isinstance(value, tuple) else value
