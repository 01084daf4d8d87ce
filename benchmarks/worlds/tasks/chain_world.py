# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose is it? Chains of "that animal" over 8 to 16 chunks; depths 0 to 4 take turns. For the bundled chain model."""

from collections.abc import Iterator

from worlds.chains.sampling import Example, sample_examples
from worlds.made import WorldTask


class ChainWorld(WorldTask):
    """The id says the depth."""

    def drawn(self, many: int, seed: int) -> Iterator[tuple[str, Example]]:
        """Draw stories in which a question follows a chain."""
        for number, one in enumerate(sample_examples(many, seed)):
            yield f"chains-{seed}-{number}-depth-{one.depth}", one
