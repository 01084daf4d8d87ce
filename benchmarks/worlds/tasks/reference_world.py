# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The bundled model's own world: who owns what, told over several chunks; nobody has seen these stories."""

from collections.abc import Iterable
from itertools import count

from worlds.world.sampling import sample_examples

from hf_blend.evaluation.tasks.base import Row, Sample, Task

DRAWN = 500  # at a time


class ReferenceWorld(Task):
    """Short stories and held-out questions without end; no instruction, no tags."""

    score = "exact-match"
    max_new_tokens = 4

    def rows(self) -> Iterable[Row]:
        """One row after the other, without end."""
        if self.data is not None:
            yield from super().rows()
            return
        for seed in count(self.seed):
            for number, one in enumerate(sample_examples(DRAWN, seed)):
                name = f"reference-{seed}-{number}"
                yield {"id": name, "chunks": one.chunks, "question": one.question, "answers": [one.answer]}

    def sample(self, row: Row) -> Sample:
        """Chunks and question as they are."""
        chunks = tuple(self.ids(chunk) for chunk in row["chunks"])
        return Sample(str(row["id"]), (), chunks, self.ids(row["question"]), tuple(row["answers"]))
