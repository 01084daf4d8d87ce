# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where stored KV belongs: the delay and cost estimators of CacheBlend (section 5.1).

    T_recompute(r, L) = r x Prefill(L)
    T_load(L, device) = bytes per token x L / throughput of the device
    ratio             = max(r*, the r at which both take as long)
    device            = the cheapest one with T_load <= T_recompute(r*)

Differs: where no device hides its loading, the one that costs least in all is chosen, the GPU's waiting included. The
paper does not price that; here a month costs storage and the GPU seconds of its requests. Where a blended prefill was
measured, its seconds take the place of r x Prefill(L): layers before the check layer, scoring and the question are in
them, which is most of a short prefill. Two things are hidden behind nothing: what the first layer waits for, which is
a chunk's first read (its first layer, or READ_BYTES where layers are smaller), and what the host does to read and
verify at any rate, as it was measured. A device hides its loading only where both are short.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..store.stream import READ_BYTES

DELAY_SHARE = 0.25  # what nothing hides may delay a request by this share of its recomputing
GB, MONTH_S, HOUR_S = 1e9, 30 * 86400.0, 3600.0


@dataclass(frozen=True)
class StorageDevice:
    """A place where chunks may be kept."""

    name: str
    bytes_s: float
    gb_month: float

    def __post_init__(self) -> None:
        if not self.bytes_s > 0 or not self.gb_month >= 0:
            raise ConfigError(
                f"device {self.name!r} reads {self.bytes_s} bytes a second for {self.gb_month} per GB and month, "
                "expected a rate above 0 and a price from 0 on."
            )


@dataclass(frozen=True)
class Workload:
    """What is stored and asked for."""

    chunks: int
    chunk_tokens: int
    chunks_per_request: int
    requests_per_day: float

    def __post_init__(self) -> None:
        if min(self.chunks, self.chunk_tokens, self.chunks_per_request) < 1 or not self.requests_per_day >= 0:
            raise ConfigError(f"{self} holds a number out of range, expected 1 or more, and requests from 0 on.")

    @property
    def request_tokens(self) -> int:
        """Tokens of the chunks of a request."""
        return self.chunk_tokens * self.chunks_per_request


@dataclass(frozen=True)
class Placement:
    """What one device means for a workload."""

    device: str
    load_s: float
    recompute_s: float
    is_hidden: bool
    ratio: float
    request_s: float
    stored_bytes: int
    storage_month: float
    gpu_month: float

    @property
    def total_month(self) -> float:
        """Both prices."""
        return self.storage_month + self.gpu_month


def recompute_s(prefill_s: float, ratio: float) -> float:
    """Seconds to recompute a share of a prompt: `r x Prefill(L)`."""
    return ratio * prefill_s


def load_s(bytes_per_token: float, tokens: int, bytes_s: float) -> float:
    """Seconds to load the KV of some tokens: bytes per token x L / throughput."""
    return bytes_per_token * tokens / bytes_s


def ratio_that_loading_hides(load: float, prefill_s: float, least_ratio: float) -> float:
    """The share that can be recomputed while others load, at least `least_ratio`, at most 1."""
    return min(1.0, max(least_ratio, load / prefill_s))


def first_share(chunk_bytes: float, num_layers: int) -> float:
    """The share of a chunk that its first read brings: a layer, or READ_BYTES where layers are smaller."""
    return min(1.0, max(1 / num_layers, READ_BYTES / chunk_bytes))


def place(
    device: StorageDevice,
    workload: Workload,
    bytes_per_token: float,
    prefill_s: float,
    *,
    least_ratio: float = 0.15,
    gpu_hour: float = 0.0,
    blend_s: float | None = None,
    num_layers: int | None = None,
    read_s: float = 0.0,
) -> Placement:
    """What it means to keep all chunks on one device."""
    tokens = workload.request_tokens
    load = load_s(bytes_per_token, tokens, device.bytes_s)
    least = recompute_s(prefill_s, least_ratio) if blend_s is None else blend_s
    ratio = ratio_that_loading_hides(load, prefill_s, least_ratio)
    beyond = max(0.0, load - read_s)  # the host's part of loading is counted once
    first = beyond * first_share(bytes_per_token * workload.chunk_tokens, num_layers) if num_layers else 0.0
    request = first + max(load - first, least + read_s)
    stored = round(bytes_per_token * workload.chunk_tokens * workload.chunks)
    requests = workload.requests_per_day * MONTH_S / 86400
    gpu = requests * request / HOUR_S * gpu_hour
    is_hidden = load <= least + read_s and first + read_s <= DELAY_SHARE * least
    return Placement(device.name, load, least, is_hidden, ratio, request, stored, stored / GB * device.gb_month, gpu)


def choose(placements: Sequence[Placement]) -> Placement:
    """The device with the cheapest storage whose loading is hidden under recomputing; if none, the cheapest in all."""
    if not placements:
        raise ConfigError("no device was named, expected one or more. Give --rate NAME=GB/s and --price NAME=PRICE.")
    hidden = [device for device in placements if device.is_hidden]
    return min(hidden or placements, key=lambda device: device.storage_month if hidden else device.total_month)
