# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The loading controller of CacheBlend (section 5.1): recompute as much as loading hides, and load what is worth it.

    r = max(r*, the r whose prefill takes as long as the loading)

Where loading is slower than even that, some chunks are better computed than loaded; how many is part of the advice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import decoder_layers
from ..model.identity import fingerprint
from ..prefill.report import Advice
from ..store import ChunkStore
from ..store.chunk import ChunkKey
from .profile import Profile, profile_of, tier_rates

STEPS = 40  # the ratio is looked for in steps of 1/40


def advise(
    profile: Profile,
    chunk_tokens: Sequence[int],
    bytes_s: Sequence[float],
    *,
    least_ratio: float = 0.3,
    num_layers: int = 1,
) -> Advice:
    """Choose the recompute ratio of a request, and which of its chunks to load, each at its bytes a second."""
    total = sum(chunk_tokens)
    # The fastest are loaded first, of equals the longest
    order = sorted(range(len(chunk_tokens)), key=lambda number: (-bytes_s[number], -chunk_tokens[number]))

    def expected(count: int, ratio: float) -> _Expected:
        """What a request takes that loads so many chunks and computes the others."""
        loaded_tokens = 0
        loading_s = 0.0
        for number in order[:count]:
            loaded_tokens += chunk_tokens[number]
            loading_s += profile.bytes_per_token * chunk_tokens[number] / bytes_s[number]
        computed = total - loaded_tokens + ratio * loaded_tokens
        computing_s = profile.prefill_s(total, computed / total)
        first_layer_s = loading_s / num_layers  # hidden behind nothing
        return _Expected(max(loading_s, computing_s) + first_layer_s, loading_s, computing_s)

    # How many to load: of equal times the most
    count = 0
    best = expected(0, least_ratio)
    for more in range(1, len(order) + 1):
        times = expected(more, least_ratio)
        if times.total_s <= best.total_s:
            count = more
            best = times
    # How much more to recompute for nothing
    ratio = least_ratio
    for step in range(1, STEPS + 1):
        times = expected(count, step / STEPS)
        if step / STEPS > ratio and times.computing_s <= times.loading_s:
            ratio = step / STEPS
            best = times
    loaded = tuple(sorted(order[:count]))
    return Advice(ratio, count, 1e3 * best.total_s, 1e3 * best.loading_s, 1e3 * best.computing_s, loaded)


class _Expected(NamedTuple):
    """Seconds that a request is expected to take."""

    total_s: float
    loading_s: float
    computing_s: float


class LoadingController:
    """Has every request load what is worth it, and recompute as much as that hides.

        store.controller = LoadingController(model, store)

    A chunk that is faster computed than loaded is computed in its place, like a question; the recompute ratio of a
    cache is then the least that is used. Measures the machine and each tier when it is made, for seconds (see
    `profile_of`); make a new one where either has changed.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        profile: Profile | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        if store.loads_in_part:
            raise ConfigError(
                "a loading controller came with a store that loads chunks in part, but what it expects of loading is "
                "that of whole chunks. Open the store without partial, or leave the controller out."
            )
        self._store = store
        self._num_layers = len(decoder_layers(model))
        self._fingerprint = fingerprint(model)
        self.profile = profile_of(model, config) if profile is None else profile
        self.rates = tier_rates(store, model) if rates is None else dict(rates)
        self.last: Advice | None = None

    def decide(self, keys: Sequence[ChunkKey], least_ratio: float) -> Advice | None:
        """What to do with the stored chunks of one request; also kept in `last`."""
        tiers = [self._store.tier_of(key) for key in keys]
        if self.rates.keys().isdisjoint(tiers) or keys[0].fingerprint != self._fingerprint:
            return None
        bytes_s = [self.rates.get(tier or "", math.inf) for tier in tiers]
        lengths = [len(key.token_ids) for key in keys]
        self.last = advise(self.profile, lengths, bytes_s, least_ratio=least_ratio, num_layers=self._num_layers)
        return self.last
