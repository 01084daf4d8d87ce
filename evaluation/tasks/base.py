# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a task promises: samples, each a question behind chunks, with the answers that count as right.

Rows of a file have `id`, `chunks`, `question` and `answers`; rows of the hub are brought to that form by each task.
The prompts are CacheBlend's (github.com/YaoJiayi/CacheBlend, example/), piece by piece, with these departures:

* Each piece is tokenized alone with no special tokens, and stays ids; the original cuts off a first token that it
  takes for BOS, joins, decodes and tokenizes again.
* `[INST]` tags stand around the prompt only where the tokenizer is Mistral's (it then has the published ids); other
  tokenizers with a chat template get what their template puts around a user's turn, others nothing.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from hf_blend.errors import ConfigError, PromptError, import_extra
from hf_blend.prompt import tokenize

ORDERS = ("given", "shuffled", "reversed")
INSTRUCTION_IDS = ((733, 16289, 28793), (733, 28748, 16289, 28793))  # [INST] and [/INST] of Mistral's tokenizer
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One prompt in pieces, as token ids, and what is right.

    Attributes:
        id: of the sample, the same in every run.
        prefix: without BOS; empty for BOS alone.
        chunks: at least one.
        question: what stands last.
        answers: each of them is right.
    """

    id: str
    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """How chunks are cut and ordered.

    Attributes:
        chunk_tokens: cut the joined chunks into pieces of so many tokens; None leaves them as they are.
        chunk_order: "given", "shuffled" or "reversed".
        seed: of the shuffling.
    """

    chunk_tokens: int | None = None
    chunk_order: str = "given"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if self.chunk_order not in ORDERS:
            raise ConfigError(f"chunk_order is {self.chunk_order!r}, wanted one of {', '.join(ORDERS)}.")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens is {self.chunk_tokens}, wanted 1 or more.")

    def applied(self, sample: Sample) -> Sample:
        """The same sample with its chunks cut and ordered."""
        chunks = list(sample.chunks)
        if self.chunk_order == "reversed":
            chunks.reverse()
        elif self.chunk_order == "shuffled":
            Random(f"{self.seed}-{sample.id}").shuffle(chunks)
        if self.chunk_tokens is not None:
            joined = [token for chunk in chunks for token in chunk]
            starts = range(0, len(joined), self.chunk_tokens)
            chunks = [tuple(joined[start : start + self.chunk_tokens]) for start in starts]
        return replace(sample, chunks=tuple(chunks))


class Task(ABC):
    """Gives samples."""

    score: ClassVar[str]  # name of the rule in `hf_blend.evaluation.scores` that counts
    max_new_tokens: ClassVar[int] = 32
    hub: ClassVar[tuple[str, str | None, str] | None] = None  # id, configuration and split on the hub
    prefix: ClassVar[str] = ""

    def __init__(self, tokenizer: Any, data: Path | None = None, seed: int = 0) -> None:
        """Prepare.

        Args:
            tokenizer: the model's.
            data: a JSONL file; None is the hub, or what the task makes itself.
            seed: for tasks that draw samples.
        """
        self.tokenizer, self.data, self.seed = tokenizer, data, seed

    @abstractmethod
    def sample(self, row: Row) -> Sample | None:
        """Turn a row into a prompt; None leaves it out."""

    def from_hub(self, row: Row) -> Row:
        """Bring a row of the hub's data set to the form of a file's row."""
        return row

    def rows(self) -> Iterable[Row]:
        """The rows, in their order."""
        if self.data is not None:
            return read_rows(self.data)
        if self.hub is None:
            raise ConfigError(f"{type(self).__name__} has no data set on the hub. Give a JSONL file with --data.")
        name, configuration, split = self.hub
        datasets = import_extra("datasets", extra="eval", wanted_by="a data set of the hub")
        return map(self.from_hub, datasets.load_dataset(name, configuration, split=split, streaming=True))

    def samples(self, limit: int | None = None, shape: Shape = Shape()) -> list[Sample]:
        """The first samples.

        Args:
            limit: how many; None is all.
            shape: how chunks are cut and ordered.

        Returns:
            The samples.

        Raises:
            PromptError: a file cannot be read, or has a line that is no sample.
        """
        found = (self.sample(row) for row in self.rows())
        return [shape.applied(one) for one in islice((one for one in found if one is not None), limit)]

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece, nothing added."""
        return tokenize(self.tokenizer, text)

    @cached_property
    def tags(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and behind a user's turn, as ids without BOS."""
        if self.ids("[INST]") == INSTRUCTION_IDS[0]:
            return INSTRUCTION_IDS
        if not getattr(self.tokenizer, "chat_template", None):
            return (), ()
        turn = [{"role": "user", "content": "\0"}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        bos = getattr(self.tokenizer, "bos_token", None) or ""
        before, _, after = text.removeprefix(bos).partition("\0")
        return self.ids(before), self.ids(after)


class QuestionTask(Task):
    """Short answers to questions over passages, as CacheBlend asks them."""

    before_question: ClassVar[str]
    score = "word-f1"

    def sample(self, row: Row) -> Sample:
        """Prefix, passages, and the question with its instruction."""
        before, after = self.tags
        asked = f"{self.before_question}{polished(row['question'])}\nAnswer:"
        return Sample(
            str(row["id"]),
            (*before, *self.ids(self.prefix)),
            tuple(self.ids(f"\n\n{chunk}\n\n") for chunk in row["chunks"]),
            (*self.ids(asked), *after),
            tuple(row["answers"]),
        )


def polished(question: str) -> str:
    """A question as CacheBlend writes it: a question mark at the end, the first letter small."""
    question = question if question.endswith("?") else f"{question}?"
    return question[:1].lower() + question[1:]


def read_rows(path: Path) -> list[Row]:
    """Read a file with one JSON object per line.

    Args:
        path: the file.

    Returns:
        The rows, an `id` added where there is none.

    Raises:
        PromptError: the file cannot be read, is empty, or a line has not what a sample needs.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the data {str(path)!r} cannot be read: {error}. Give a JSONL file.") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise PromptError(f"the data {str(path)!r} has no line. Write one JSON object per line.")
    return rows


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"line {number} of {str(path)!r} is no JSON: {error}. Correct it.") from error
    is_row = isinstance(row, dict) and _are_texts(row.get("chunks")) and _are_texts(row.get("answers"))
    if not is_row or not isinstance(row.get("question"), str):
        raise PromptError(
            f"line {number} of {str(path)!r} is {line[:60]!r}, but an object with chunks (texts), question (a text) "
            "and answers (texts) is wanted."
        )
    return {"id": str(number), **row}


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and all(
        isinstance(one, str) for one in value
    )
