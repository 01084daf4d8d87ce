# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A needle in a haystack: a number hidden in one of several chunks of sentences that say nothing of it."""

from collections.abc import Iterable
from random import Random

from .base import Row, Sample, Task

CHUNKS, SENTENCES = 6, 12
FILLERS = (
    "The grass is green and the sky is blue.", "The road follows the river for a while.", "Some shops open late.",
    "A bridge was painted last year.", "The train leaves from the second platform.", "It rained for most of the week.",
    "Most houses here have red roofs.", "The library has a reading room.", "A ferry crosses the lake twice a day.",
    "The bakery sells out before noon.", "Old maps hang in the hall.", "The wind comes from the west in autumn.",
    "A path leads from the church to the mill.", "The market is held on the square.", "Tickets are sold at the gate.",
)  # fmt: skip
CITIES = ("Lisbon", "Oslo", "Lima", "Cairo", "Quito", "Riga", "Perth", "Turin")


class Needle(Task):
    """Made here, with no end of samples; a file with the usual rows may be given instead."""

    score = "exact-match"
    max_new_tokens = 8
    prefix = "Read the text and answer the question behind it.\n\n"

    def rows(self) -> Iterable[Row]:
        """One row after the other."""
        if self.data is not None:
            yield from super().rows()
            return
        number = 0
        while True:
            yield self._drawn(number)
            number += 1

    def sample(self, row: Row) -> Sample:
        """Prefix, chunks, question."""
        chunks = [f"{chunk}\n" for chunk in row["chunks"]]
        return self.made(row, chunks, f"\n\nQuestion: {row['question']}\nAnswer:")

    def _drawn(self, number: int) -> Row:
        random = Random(f"needle-{self.seed}-{number}")
        city, secret = random.choice(CITIES), str(random.randrange(1000, 9999))
        chunks = [[random.choice(FILLERS) for _ in range(SENTENCES)] for _ in range(CHUNKS)]
        random.choice(chunks).insert(random.randrange(SENTENCES), f"The magic number of {city} is {secret}.")
        return {
            "id": f"needle-{number}",
            "chunks": [" ".join(chunk) for chunk in chunks],
            "question": f"What is the magic number of {city}?",
            "answers": [secret],
        }
