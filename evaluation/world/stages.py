# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the reference model is trained on, stage by stage: from names to pronouns, roles, towns and more people."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .story import Level

NAMES_ONLY = Level(people=(2, 3), facts=(3, 5), pronoun_share=0.0, role_share=0.0, town_share=0.2, filler_share=0.1)
SOME_PRONOUNS = replace(NAMES_ONLY, pronoun_share=0.5, role_share=0.2, town_share=0.3)
FULL = Level()


@dataclass(frozen=True)
class Stage:
    """One stretch of training with its own warm-up and decay of the learning rate.

    `layers` is how many decoder layers the model has from here on; `length` is tokens per row, `rows` rows per step;
    `repeat_share` is the share of rows that are random repeats; `mixed_share` is the share of story rows taken from
    the easier `SOME_PRONOUNS`.
    """

    name: str
    level: Level
    layers: int
    length: int
    rows: int
    steps: int
    learning_rate: float
    repeat_share: float = 0.0
    mixed_share: float = 0.0
    decay_share: float = 0.6

    def rate(self, step: int) -> float:
        """Return the learning rate at a step: short warm-up, plateau, linear decay to 3 % of the peak."""
        warm = min(1.0, (step + 1) / 50)
        left = (self.steps - step) / max(1.0, self.steps * self.decay_share)
        return self.learning_rate * warm * max(0.03, min(1.0, left))


STAGES = (
    Stage("names", NAMES_ONLY, 4, 144, 16, 2400, 3e-3, repeat_share=0.3),
    Stage("pronouns", SOME_PRONOUNS, 4, 144, 16, 3000, 3e-3, repeat_share=0.15),
    Stage("full", FULL, 4, 224, 12, 4000, 3e-3, mixed_share=0.3),
    Stage("deep", FULL, 8, 224, 12, 5000, 2e-3, mixed_share=0.2),
)
