# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""SAMSum: summarise a dialogue after examples, each example a chunk."""

from collections.abc import Iterable
from itertools import islice

from hf_blend.errors import import_extra

from .base import Row, Sample, Task, read_rows

MOST_EXAMPLE_TOKENS = 3400
EXAMPLES = 20


class Samsum(Task):
    """CacheBlend's few-shot prompt: no tags, examples as they are, the middle one left out until the rest fits.

    Departs: from the hub, the examples of every sample are the first `EXAMPLES` of the training split, where
    CacheBlend used LongBench's own choice per sample.
    """

    score = "rouge-l"
    max_new_tokens = 128
    hub = ("knkarthick/samsum", None, "test")
    prefix = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"

    def rows(self) -> Iterable[Row]:
        """Rows with their examples as chunks."""
        if self.data is not None:
            return read_rows(self.data)
        datasets = import_extra("datasets", extra="eval", wanted_by="a data set of the hub")
        name, configuration, split = self.hub or ("", None, "")
        trained = islice(datasets.load_dataset(name, configuration, split="train", streaming=True), EXAMPLES)
        chunks = [f"Dialogue: {row['dialogue']}\nSummary: {row['summary']}\n" for row in trained]
        asked = datasets.load_dataset(name, configuration, split=split, streaming=True)
        return (
            {
                "id": row["id"],
                "chunks": chunks,
                "question": f"Dialogue: {row['dialogue']}\nSummary: ",
                "answers": [row["summary"]],
            }
            for row in asked
        )

    def sample(self, row: Row) -> Sample | None:
        """Examples that fit, then the dialogue; None if not even one fits."""
        chunks = [self.ids(chunk) for chunk in row["chunks"]]
        while chunks and sum(map(len, chunks)) > MOST_EXAMPLE_TOKENS:
            del chunks[len(chunks) // 2]
        if not chunks:
            return None
        question = self.ids("\n\n" + row["question"])
        return Sample(str(row["id"]), self.ids(self.prefix), tuple(chunks), question, tuple(row["answers"]))
