# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose is it, and how is that known? Every sentence of the chain in turn; for models of reference_model/draft.py."""

from collections.abc import Iterable
from itertools import count

from ..chains.sampling import sample_examples
from ..chains.story import Level
from .base import Row, Sample, Task

DRAWN = 500  # at a time
LEVEL = Level(chunks=(6, 10), facts=(1, 3), fillers=(2, 4), depth=2)


class ChainLinks(Task):
    """Held-out questions of the chain world; a sentence of the chain is right word for word, or wrong."""

    score = "sentence-f1"
    also = ("answer-match",)
    max_new_tokens = 40
    is_long = True

    def rows(self) -> Iterable[Row]:
        """One row after the other, without end; the id says the depth."""
        if self.data is not None:
            yield from super().rows()
            return
        for part in count():
            for number, one in enumerate(sample_examples(DRAWN, self.seed + part, level=LEVEL)):
                name = f"links-{self.seed + part}-{number}-depth-{one.depth}"
                yield {"id": name, "chunks": one.chunks, "question": one.question, "answers": [one.chain]}

    def sample(self, row: Row) -> Sample:
        """Chunks and question as they are; answers as the tokenizer writes them."""
        chunks = tuple(self.ids(chunk) for chunk in row["chunks"])
        answers = tuple(self.tokenizer.decode(self.ids(one)) for one in row["answers"])
        return Sample(str(row["id"]), (), chunks, self.ids(row["question"]), answers)
