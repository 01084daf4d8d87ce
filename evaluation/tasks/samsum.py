# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""SAMSum: summarise a dialogue after examples, each example a chunk."""

from collections.abc import Iterable
from itertools import islice

from .base import Row, Sample, Task

MOST_EXAMPLE_TOKENS = 3400
EXAMPLES = 20


class Samsum(Task):
    """CacheBlend's few-shot prompt: no tags, examples as they are, the middle one left out until the rest fits.

    Departs: from the hub, the examples of every sample are the first `EXAMPLES` of the training split, where
    CacheBlend used LongBench's own choice per sample. A row without a question is a dialogue to summarise at once.
    """

    score = "rouge-l"
    max_new_tokens = 128
    also = ()
    asks = False
    hub = ("knkarthick/samsum", None, "test")
    prefix = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"

    def rows(self) -> Iterable[Row]:
        """Rows with their examples as chunks."""
        if self.data is not None:
            return super().rows()
        trained = islice(self.hub_rows("train"), EXAMPLES)
        chunks = [f"Dialogue: {row['dialogue']}\nSummary: {row['summary']}\n" for row in trained]
        return (
            {
                "id": row["id"],
                "chunks": chunks,
                "question": f"Dialogue: {row['dialogue']}\nSummary: ",
                "answers": [row["summary"]],
            }
            for row in self.hub_rows("test")
        )

    def sample(self, row: Row) -> Sample | None:
        """Examples that fit, then the dialogue; None if not even one fits."""
        chunks = [self.ids(chunk) for chunk in row["chunks"]]
        while chunks and sum(map(len, chunks)) > MOST_EXAMPLE_TOKENS:
            del chunks[len(chunks) // 2]
        if not chunks:
            return None
        question = self.ids("\n\n" + (row["question"] or "Summary: "))
        return Sample(str(row["id"]), self.ids(self.prefix), tuple(chunks), question, tuple(row["answers"]))
