# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The loading controller of CacheBlend (section 5.1): recompute as much as loading hides, and load what is worth it.

    r = max(r*, the r whose prefill takes as long as the loading)

Where loading is slower than even that, some chunks are better computed than loaded; how many is part of the advice.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import decoder_layers
from ..model.fingerprint import fingerprint
from ..prefill.report import Advice
from ..store import ChunkStore
from ..store.chunk import ChunkKey
from .profile import Profile, profile_of, tier_rates

STEPS = 40  # the ratio is looked for in steps of 1/40
LEARNED_SHARE = 0.25  # of the newest request in what is believed
FORGOTTEN_SHARE = 0.02  # of what was learnt of a tier, with each request that reads nothing from it
MOST_STEP = 2.0  # a request counts as at most so many times as slow, or as fast, as was expected


def advise(
    profile: Profile,
    chunk_tokens: Sequence[int],
    bytes_s: float | Sequence[float],
    *,
    least_ratio: float = 0.15,
    num_layers: int = 1,
    tiers: Mapping[str, float] | None = None,
) -> Advice:
    """Choose the recompute ratio and which chunks to load for a request."""
    total = sum(chunk_tokens)
    rates = [float(bytes_s)] * len(chunk_tokens) if isinstance(bytes_s, int | float) else list(bytes_s)
    order = sorted(range(len(rates)), key=lambda place: (-rates[place], -chunk_tokens[place]))

    def expected(count: int, ratio: float) -> tuple[float, float, float]:
        """Seconds in all, loading and computing, if the fastest chunks are loaded; of equals the longest first."""
        kept = sum(chunk_tokens[place] for place in order[:count])
        loading = sum(profile.bytes_per_token * chunk_tokens[place] / rates[place] for place in order[:count])
        computing = profile.prefill_s(total, (kept * ratio + total - kept) / total)
        return max(loading, computing) + loading / num_layers, loading, computing

    count = min(range(len(rates) + 1), key=lambda some: (expected(some, least_ratio)[0], -some))
    ratio, (time_s, loading, computing) = least_ratio, expected(count, least_ratio)
    for step in range(1, STEPS + 1):  # more for nothing
        more = step / STEPS
        times = expected(count, more)
        if more > ratio and times[2] <= loading:
            ratio, (time_s, loading, computing) = more, times
    most = profile.prefill_s(total, ratio)
    hidden = [name for name, rate in (tiers or {}).items() if profile.bytes_per_token * total / rate <= most]
    times_ms = (1e3 * time_s, 1e3 * loading, 1e3 * computing)
    return Advice(ratio, count, *times_ms, tuple(hidden), tuple(sorted(order[:count])))


class LoadingController:
    """Has every request load what is worth it, and recompute as much as that hides.

        store.controller = LoadingController(model, store)

    A chunk that is faster computed than loaded is computed in its place, like a question; the recompute ratio of a
    cache is then the least that is used. Measures the machine when it is made (see `profile_of`), for seconds, and
    learns from the requests that follow: from what they read how fast each tier is now, from how long they take how
    fast prefills are. A tier from which nothing was read lately is believed to be as fast as it was at first, so that
    one which was slow for a while is tried again.
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
        self._store, self._num_layers = store, len(decoder_layers(model))
        self._fingerprint, config = fingerprint(model), config or BlendConfig()
        self.profile = profile_of(model, config) if profile is None else profile
        self.rates = tier_rates(store, model) if rates is None else dict(rates)
        self._first_rates, self._traffic = dict(self.rates), store.traffic()
        self.slowdown, self._profile, self._lock = 1.0, self.profile, threading.RLock()
        self.last: Advice | None = None

    def decide(self, keys: Sequence[ChunkKey], least_ratio: float) -> Advice | None:
        """What to do with the stored chunks of one request; also kept in `last`."""
        places = [self._store.tier_of(key) for key in keys]
        if not any(place in self.rates for place in places) or keys[0].fingerprint != self._fingerprint:
            return None
        with self._lock:
            self._learn_rates()
            profile, rates = self._profile, self.rates
        bytes_s = [rates.get(place or "", math.inf) for place in places]
        lengths = [len(key.token_ids) for key in keys]
        options: Any = {"least_ratio": least_ratio, "num_layers": self._num_layers, "tiers": rates}
        self.last = advise(profile, lengths, bytes_s, **options)
        return self.last

    def observe(self, advice: Advice, seconds: float) -> None:
        """Learn from a request how fast prefills are now."""
        if advice.load_ms > advice.compute_ms or not advice.compute_ms > 0:
            return
        waiting_ms = advice.predicted_ms - advice.compute_ms
        slowdown = (1e3 * seconds - waiting_ms) / advice.compute_ms
        with self._lock:  # a request that something else delayed changes the estimate only a little
            self.slowdown *= 1 + LEARNED_SHARE * (min(max(slowdown, 1 / MOST_STEP), MOST_STEP) - 1)
            self._profile = self.profile.slowed(self.slowdown)

    def _learn_rates(self) -> None:
        """Update the rates from what was read since the last request."""
        before, self._traffic = self._traffic, self._store.traffic()
        rates = {}
        for tier, rate in self.rates.items():
            (nbytes, seconds), (old_nbytes, old_seconds) = (log.get(tier, (0, 0.0)) for log in (self._traffic, before))
            if nbytes > old_nbytes and seconds > old_seconds:
                rates[tier] = rate + LEARNED_SHARE * ((nbytes - old_nbytes) / (seconds - old_seconds) - rate)
            else:
                rates[tier] = rate + FORGOTTEN_SHARE * (self._first_rates[tier] - rate)
        self.rates = rates
