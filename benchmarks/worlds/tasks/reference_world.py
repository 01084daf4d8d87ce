# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The bundled model's own world: who owns what, told over several chunks; nobody has seen these stories."""

from collections.abc import Iterator

from worlds.made import WorldTask
from worlds.world.sampling import Example, sample_examples


class ReferenceWorld(WorldTask):
    """Short stories."""

    def drawn(self, many: int, seed: int) -> Iterator[tuple[str, Example]]:
        """Draw stories, one question each."""
        for number, one in enumerate(sample_examples(many, seed)):
            yield f"reference-{seed}-{number}", one
