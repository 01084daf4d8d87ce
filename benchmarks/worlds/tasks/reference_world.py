# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The bundled model's own world: who owns what, told over several chunks; nobody has seen these stories."""

from collections.abc import Iterable
from itertools import count

from worlds.world.sampling import sample_examples

from hf_blend.evaluation.tasks.base import Row, Sample, Task

DRAWN = 500  # at a time


class ReferenceWorld(Task):
    """Held-out questions, in the form that the bundled model was trained on: no instruction, no tags."""

    score = "exact-match"
    max_new_tokens = 4

    def rows(self) -> Iterable[Row]:
        """One row after the other, without end."""
        if self.data is not None:
            yield from super().rows()
            return
        for part in count():
            for number, one in enumerate(sample_examples(DRAWN, self.seed + part)):
                name = f"reference-{self.seed + part}-{number}"
                yield {"id": name, "chunks": one.chunks, "question": one.question, "answers": [one.answer]}

    def sample(self, row: Row) -> Sample:
        """Chunks and question as they are."""
        chunks = tuple(self.ids(chunk) for chunk in row["chunks"])
        return Sample(str(row["id"]), (), chunks, self.ids(row["question"]), tuple(row["answers"]))
