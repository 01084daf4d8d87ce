# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Multi-News: one summary of several news articles, each article a chunk."""

import hashlib

from .base import Row, Sample, Task

SEPARATOR = "|||||"  # between the articles of the data set


class MultiNews(Task):
    """LongBench's prompt; CacheBlend has no script for this set. Golds are long, so no first line is cut out.

    From the hub comes a copy in parquet: the authors' own (alexfabbri/multi_news) is a script, which `datasets` no
    longer runs. Departs: LongBench gives the articles as one text; here each ends in an empty line.
    """

    score = "rouge-l-whole"
    max_new_tokens = 512
    also = ()
    asks = False
    hub = ("Awesome075/multi_news_parquet", None, "test")
    prefix = "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"

    def from_hub(self, row: Row) -> Row:
        """The articles of a row become chunks."""
        chunks = [article.strip() for article in row["document"].split(SEPARATOR) if article.strip()]
        name = hashlib.sha256(row["document"].encode()).hexdigest()[:16]
        return {"id": name, "chunks": chunks, "question": "", "answers": [row["summary"]]}

    def sample(self, row: Row) -> Sample | None:
        """Articles, then the order to summarise; None where a row holds no article."""
        if not row["chunks"]:
            return None
        instruction = "\n\nNow, write a one-page summary of all the news.\n\nSummary:"
        return self.made(row, [f"{chunk}\n\n" for chunk in row["chunks"]], instruction)
