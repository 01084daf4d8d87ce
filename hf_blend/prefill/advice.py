# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the loading controller says of a request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """What to do with a request, and what is expected of it."""

    ratio: float
    loaded_chunks: int
    predicted_ms: float
    load_ms: float
    compute_ms: float
    hidden_tiers: tuple[str, ...] = ()
    loaded: tuple[int, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        hidden = f"; hidden: {', '.join(self.hidden_tiers)}" if self.hidden_tiers else ""
        return (
            f"recompute {self.ratio:.1%}, load {self.loaded_chunks} chunks: {self.predicted_ms:.0f} ms expected "
            f"(loading {self.load_ms:.0f} ms, computing {self.compute_ms:.0f} ms){hidden}"
        )
