# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The loading controller of CacheBlend (section 5.1): recompute as much as loading hides, and load what is worth it.

    r = max(r*, the r whose prefill takes as long as the loading)

Where loading is slower than even that, some chunks are better computed than loaded; how many is part of the advice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .profile import Profile

STEPS = 40  # the ratio is looked for in steps of 1/40


@dataclass(frozen=True)
class Advice:
    """What to do with a request, and what is expected of it.

    Attributes:
        ratio: recompute ratio, never below the one that quality asks for.
        loaded_chunks: how many chunks to load; the others are faster computed.
        predicted_ms: time to the first token, loading and computing side by side.
        load_ms: of this, what loading takes.
        compute_ms: of this, what computing takes.
        hidden_tiers: tiers whose loading stays hidden behind computing at the least ratio, the cheapest last.
    """

    ratio: float
    loaded_chunks: int
    predicted_ms: float
    load_ms: float
    compute_ms: float
    hidden_tiers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        hidden = f"; hidden: {', '.join(self.hidden_tiers)}" if self.hidden_tiers else ""
        return (
            f"recompute {self.ratio:.1%}, load {self.loaded_chunks} chunks: {self.predicted_ms:.0f} ms expected "
            f"(loading {self.load_ms:.0f} ms, computing {self.compute_ms:.0f} ms){hidden}"
        )


def advise(
    profile: Profile,
    chunk_tokens: Sequence[int],
    bytes_s: float,
    *,
    least_ratio: float = 0.15,
    num_layers: int = 1,
    tiers: Mapping[str, float] | None = None,
) -> Advice:
    """Choose ratio and chunks for a request whose chunks are all in one tier.

    Args:
        profile: of the model on this machine.
        chunk_tokens: length of each chunk.
        bytes_s: of the tier.
        least_ratio: r*, what quality asks for.
        num_layers: of the model; the first layer's loading is hidden behind nothing.
        tiers: bytes a second of every tier there is, from the dearest to the cheapest.

    Returns:
        The advice.
    """
    total = sum(chunk_tokens)

    def load_s(tokens: int, rate: float = bytes_s) -> float:
        return tokens * profile.bytes_per_token / rate

    def expected(count: int, ratio: float) -> tuple[float, float, float]:
        """Time, loading and computing, with the longest chunks loaded."""
        kept = sum(sorted(chunk_tokens, reverse=True)[:count])
        loading = load_s(kept)
        computing = profile.prefill_s(total, (kept * ratio + total - kept) / total)
        return max(loading, computing) + loading / num_layers, loading, computing

    count = min(range(len(chunk_tokens) + 1), key=lambda some: (expected(some, least_ratio)[0], -some))
    ratio, (time_s, loading, computing) = least_ratio, expected(count, least_ratio)
    for step in range(1, STEPS + 1):  # more for nothing
        more = step / STEPS
        found = expected(count, more)
        if more > ratio and found[2] <= loading:
            ratio, (time_s, loading, computing) = more, found
    hidden = [name for name, rate in (tiers or {}).items() if load_s(total, rate) <= profile.prefill_s(total, ratio)]
    return Advice(ratio, count, 1e3 * time_s, 1e3 * loading, 1e3 * computing, tuple(hidden))
