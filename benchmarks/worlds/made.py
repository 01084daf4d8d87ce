# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the tasks of both worlds have in common: held-out questions without end, as their model was trained on them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from hf_blend.evaluation.tasks.base import Row, Sample, Task

DRAWN = 500  # at a time


class WorldTask(Task):
    """No instruction, no tags."""

    score = "exact-match"
    max_new_tokens = 4

    @abstractmethod
    def drawn(self, many: int, seed: int) -> Iterator[tuple[str, Any]]:
        """Draw so many examples, each with its id."""

    def rows(self) -> Iterable[Row]:
        """One row after the other, without end."""
        if self.data is not None:
            yield from super().rows()
            return
        for part in count():
            for name, one in self.drawn(DRAWN, self.seed + part):
                yield {"id": name, "chunks": one.chunks, "question": one.question, "answers": [one.answer]}

    def sample(self, row: Row) -> Sample:
        """Chunks and question as they are."""
        chunks = tuple(self.ids(chunk) for chunk in row["chunks"])
        return Sample(str(row["id"]), (), chunks, self.ids(row["question"]), tuple(row["answers"]))
