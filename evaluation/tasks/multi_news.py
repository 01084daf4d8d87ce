# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-News: one summary of several news articles, each article a chunk."""

import hashlib

from .base import Row, Sample, Task

SEPARATOR = "|||||"  # between the articles of the data set


class MultiNews(Task):
    """LongBench's prompt; CacheBlend has no script for this set. Golds are long, so no first line is cut out."""

    score = "rouge-l-whole"
    max_new_tokens = 512
    hub = ("alexfabbri/multi_news", None, "test")
    prefix = "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"

    def from_hub(self, row: Row) -> Row:
        """The articles of a row become chunks."""
        chunks = [part.strip() for part in row["document"].split(SEPARATOR) if part.strip()]
        name = hashlib.sha256(row["document"].encode()).hexdigest()[:16]
        return {"id": name, "chunks": chunks, "question": "", "answers": [row["summary"]]}

    def sample(self, row: Row) -> Sample | None:
        """Articles, then the order to summarise; None where a row holds no article."""
        chunks = tuple(self.ids(f"{chunk}\n\n") for chunk in row["chunks"])
        asked = self.ids("\n\nNow, write a one-page summary of all the news.\n\nSummary:")
        before, after = self.tags
        prefix = (*before, *self.ids(self.prefix))
        return Sample(str(row["id"]), prefix, chunks, (*asked, *after), tuple(row["answers"])) if chunks else None
