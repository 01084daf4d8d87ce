# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose is it? Chains of "that animal" over 8 to 16 chunks; depths 0 to 4 take turns. For the bundled chain model."""

from collections.abc import Iterable
from itertools import count

from worlds.chains.sampling import sample_examples

from hf_blend.evaluation.tasks.base import Row, Sample, Task

DRAWN = 500  # at a time


class ChainWorld(Task):
    """Held-out questions, in the form that the chain model was trained on: no instruction, no tags."""

    score = "exact-match"
    max_new_tokens = 4

    def rows(self) -> Iterable[Row]:
        """One row after the other, without end; the id says the depth."""
        if self.data is not None:
            yield from super().rows()
            return
        for part in count():
            for number, one in enumerate(sample_examples(DRAWN, self.seed + part)):
                name = f"chains-{self.seed + part}-{number}-depth-{one.depth}"
                yield {"id": name, "chunks": one.chunks, "question": one.question, "answers": [one.answer]}

    def sample(self, row: Row) -> Sample:
        """Chunks and question as they are."""
        chunks = tuple(self.ids(chunk) for chunk in row["chunks"])
        return Sample(str(row["id"]), (), chunks, self.ids(row["question"]), tuple(row["answers"]))
