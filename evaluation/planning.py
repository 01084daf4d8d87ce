# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where a store's chunks belong, from rates and prices as users write them; what `hf-blend store plan` does."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from hf_blend.errors import ConfigError, suggest
from hf_blend.loading.estimator import GB, Placement, StorageDevice, Workload, choose, place
from hf_blend.model_names import load_config

from .bundled import KV_DTYPES, choose_dtype, load_model
from .cache_size import cache_size

MEMORY = "memory"


def planned(
    model: str,
    work: tuple[int, int, int, float],
    options: Mapping[str, Sequence[str] | None],
    *,
    prefill_s: float | None,
    ratio: float,
    gpu_hour: float,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Estimate every device and choose one."""
    rates, prices = (_pairs(name, options.get(name), float) for name in ("rate", "price"))
    places, workload = _pairs("at", options.get("at"), str), Workload(*work)
    for name in rates:
        if name not in prices:
            raise ConfigError(f"device {name!r} has a rate and no price, expected both. Give --price {name}=PRICE.")
    for name in places:
        if name not in prices:
            raise ConfigError(f"device {name!r} has no price. {suggest(name, prices)} Give --price {name}=PRICE.")
    machine = _Machine(model)
    rates |= {name: machine.rate(name, places.get(name)) for name in prices if name not in rates}
    devices = [StorageDevice(name, rate * GB, prices[name]) for name, rate in rates.items()]
    token_bytes, prefill, measured = _measures(machine, dtype, prefill_s, workload, ratio)
    given_here: dict[str, Any] = {"least_ratio": ratio, "gpu_hour": gpu_hour, **measured}
    rows = []
    for device in devices:
        is_held = device.name == MEMORY and device.name not in places  # chunks are ready to use: nothing is read
        measures = given_here | {"read_s": 0.0} if is_held else given_here
        rows.append(place(device, workload, token_bytes, prefill, **measures))
    chosen = choose(rows)
    return {
        "model": model,
        "bytes_per_token": token_bytes,
        "prefill_s": prefill,
        "rows": [{**asdict(row), "total_month": row.total_month} for row in rows],
        "chosen": chosen.device,
        "store": _settings(chosen, places),
    }


def _pairs(option: str, texts: Sequence[str] | None, read: Callable[[str], Any]) -> dict[str, Any]:
    pairs = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        try:
            pairs[name] = read(value)
        except ValueError:
            name = ""
        if not name or not value:
            kind = "TEXT" if read is str else "NUMBER"
            raise ConfigError(f"--{option} is {text!r}, expected NAME={kind}, such as disk=4.8.")
    return pairs


class _Machine:
    """A model on this machine, loaded when something is to be measured."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def model(self) -> Any:
        return load_model(self.name)[0]

    def rate(self, device: str, location: str | None) -> float:
        """10^9 bytes a second at which a store gives back a chunk from a device: read, verified."""
        from hf_blend import ChunkStore
        from hf_blend.loading.profile import bytes_per_second

        if device == MEMORY and location is None:  # chunks are held there ready to use
            return bytes_per_second(ChunkStore.open("memory://"), self.model) / GB
        with tempfile.TemporaryDirectory() as scratch, ChunkStore.open(location or scratch, memory_bytes=0) as store:
            return bytes_per_second(store, self.model) / GB


def _measures(
    machine: _Machine, dtype: str | None, prefill_s: float | None, work: Workload, ratio: float
) -> tuple[float, float, dict[str, Any]]:
    """Bytes of K and V of a token, seconds of a full prefill, and what else of `place` was measured."""
    tokens = work.request_tokens
    if prefill_s is None:
        from hf_blend.loading.profile import profile_of, reading_s
        from hf_blend.model.anatomy import decoder_layers

        profile = profile_of(machine.model)
        measured = {
            "blend_s": profile.prefill_s(tokens, ratio),
            "num_layers": len(decoder_layers(machine.model)),
            "read_s": reading_s(machine.model, work.chunks_per_request, work.chunk_tokens, ratio),
        }
        return profile.bytes_per_token, profile.prefill_s(tokens, 1.0), measured
    kind: Any = None if dtype is None else choose_dtype(dtype, KV_DTYPES)
    if prefill_s <= 0:
        raise ConfigError(f"prefill_s is {prefill_s}, expected seconds above 0. Leave it out to measure it here.")
    return cache_size(load_config(machine.name), context_tokens=tokens, dtype=kind).bytes_per_token, prefill_s, {}


def _settings(chosen: Placement, places: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of `ChunkStore.open` for a device."""
    location = places.get(chosen.device)
    if chosen.device == MEMORY and location is None:
        return {"location": "memory://", "memory_bytes": chosen.stored_bytes}
    if location is not None and "://" in location:
        return {"location": location}
    return {"location": location, "disk_bytes": chosen.stored_bytes}
