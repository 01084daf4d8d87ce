# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a server would do under load on other machines, from service times measured on this one.

A discrete-event replay of continuous batching: requests come, each is prefilled in slices, first come first served,
and between two slices everyone who decodes gets a token. Nothing else is modelled: no cache that fills up, no two
prefills that share a step, no time to admit a request. How far off that is, is measured: the replay of the very run
that was timed is compared with it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

__all__ = ["Replayed", "Service", "replay"]


@dataclass(frozen=True)
class Service:
    """How long one server takes."""

    prefill_s: tuple[float, ...]
    slice_s: float
    token_s: float
    crowded_s: float
    crowd: int

    def step_s(self, decoding: int) -> float:
        """How long a step takes, between the two that were measured along a line; 0 if nobody decodes."""
        if not decoding:
            return 0.0
        share = (decoding - 1) / max(1, self.crowd - 1)
        return self.token_s + share * (self.crowded_s - self.token_s)

    def faster(self, prefill: float, decode: float) -> "Service":
        """The same on another machine."""
        times = tuple(seconds / prefill for seconds in self.prefill_s)
        return replace(self, prefill_s=times, token_s=self.token_s / decode, crowded_s=self.crowded_s / decode)


@dataclass(frozen=True)
class Replayed:
    """When each request's tokens came."""

    first_token_s: tuple[float, ...]
    next_token_s: tuple[float, ...]
    took_s: float


def replay(service: Service, arrivals: Sequence[float], new_tokens: int, servers: int = 1) -> Replayed:
    """Answer requests with measured service times."""
    free_at = [0.0] * servers
    queues: list[list[int]] = [[] for _ in range(servers)]
    for number, (at, work) in enumerate(zip(arrivals, service.prefill_s, strict=True)):
        chosen = min(range(servers), key=lambda server: max(free_at[server], at))
        free_at[chosen] = max(free_at[chosen], at) + work
        queues[chosen].append(number)
    times = dict[int, list[float]]()
    for queue in queues:
        times |= _serve(service, [(number, arrivals[number]) for number in queue], new_tokens)
    return Replayed(
        tuple(times[number][0] - at for number, at in enumerate(arrivals)),
        tuple(after - before for row in times.values() for before, after in pairwise(row)),
        max(row[-1] for row in times.values()) - arrivals[0],
    )


def _serve(service: Service, queue: Sequence[tuple[int, float]], new_tokens: int) -> dict[int, list[float]]:
    """When one server gives the tokens of its requests."""
    waiting, now = list(queue), 0.0
    left, times = math.nan, {number: list[float]() for number, _ in queue}
    decoding: list[int] = []
    while waiting or decoding:
        if not decoding and waiting:
            now = max(now, waiting[0][1])
        if waiting and waiting[0][1] <= now and len(decoding) < service.crowd:
            number = waiting[0][0]
            left = service.prefill_s[number] if math.isnan(left) else left
            spent = min(left, service.slice_s) if decoding else left
            now, left = now + spent, left - spent
            if left <= 0:
                waiting.pop(0)
                decoding.append(number)
                left = math.nan
        now += service.step_s(len(decoding))
        for number in decoding:
            times[number].append(now)
        decoding = [number for number in decoding if len(times[number]) < new_tokens]
    return times
