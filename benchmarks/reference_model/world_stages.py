# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the reference model is trained on, stage by stage: from names to pronouns, roles, towns and more people."""

from __future__ import annotations

from dataclasses import dataclass

from worlds.world.story import Level

PAIRS = Level((3, 4), (1, 1), 0.0, 0.0, 0.0, 0.0, relations=("home", "food"))
SOME_PRONOUNS = Level((2, 4), (2, 4), 0.5, 0.3, 0.4, 0.1)
FULL = Level()


@dataclass(frozen=True)
class Stage:
    """One stretch of training with its own warm-up and decay of the learning rate.

    `length` is tokens per row, `rows` rows per batch and `steps` batches; a share `easy_share` of the rows is drawn
    from the level `easy` instead.
    """

    name: str
    level: Level
    length: int
    rows: int
    steps: int
    learning_rate: float
    easy: Level = FULL
    easy_share: float = 0.0
    decay_share: float = 0.6
    weight_decay: float = 0.02

    def rate(self, step: int) -> float:
        """Return the learning rate at a step: short warm-up, plateau, linear decay to 3 % of the peak."""
        warm = min(1.0, (step + 1) / 50)
        left = (self.steps - step) / max(1.0, self.steps * self.decay_share)
        return self.learning_rate * warm * max(0.03, min(1.0, left))


STAGES = (
    Stage("pairs", PAIRS, length=64, rows=32, steps=300, learning_rate=2e-3),
    Stage("pronouns", SOME_PRONOUNS, length=160, rows=16, steps=1000, learning_rate=2e-3, easy=PAIRS, easy_share=0.1),
    Stage("full", FULL, length=224, rows=12, steps=1550, learning_rate=2e-3, easy=SOME_PRONOUNS, easy_share=0.25),
    Stage("polish", FULL, length=224, rows=12, steps=2000, learning_rate=2e-3, easy=SOME_PRONOUNS, easy_share=0.1),
    Stage("settle", FULL, length=224, rows=12, steps=900, learning_rate=1e-3, decay_share=0.9, weight_decay=0.3),
)
