# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a task promises: samples, each a question behind chunks, with the answers that count as right.

Rows of a file have `id`, `chunks`, `question` and `answers`; rows of the hub are brought to that form by each task.
The prompts are CacheBlend's (github.com/YaoJiayi/CacheBlend, example/), piece by piece, with these departures:

* Each piece is tokenized alone with no special tokens, and stays ids; the original cuts off a first token that it
  takes for BOS, joins, decodes and tokenizes again.
* `[INST]` tags stand around the prompt only where the tokenizer is Mistral's (it then has the published ids); other
  tokenizers with a chat template get what their template puts around a user's turn, others nothing.
* A passage stands between empty lines; in the original it does so behind its title, which is always empty there.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from hf_blend.errors import ConfigError, PromptError, import_extra
from hf_blend.prompt.pieces import front_ids, tokenize

from ..rows import read_rows

ORDERS = ("given", "shuffled", "reversed")
INSTRUCTION_IDS = ((733, 16289, 28793), (733, 28748, 16289, 28793))  # [INST] and [/INST] of Mistral's tokenizer
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sample:
    """One prompt in pieces, as token ids, and what is right."""

    id: str
    prefix: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """How chunks are cut and ordered."""

    chunk_tokens: int | None = None
    chunk_order: str = "given"
    seed: int = 0
    most_chunks: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_order not in ORDERS:
            raise ConfigError(f"chunk_order is {self.chunk_order!r}, expected one of {', '.join(ORDERS)}.")
        for name in ("chunk_tokens", "most_chunks"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name} is {count}, expected 1 or more.")

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
        return replace(sample, chunks=tuple(chunks[: self.most_chunks]))


class Task(ABC):
    """Gives samples."""

    score: ClassVar[str]  # name of the rule in `hf_blend.evaluation.scores` that counts
    also: ClassVar[tuple[str, ...]] = ("word-f1", "exact-match")  # rules that are counted beside it
    max_new_tokens: ClassVar[int] = 32
    hub: ClassVar[tuple[str, str | None, str] | None] = None  # id, configuration and split on the hub
    prefix: ClassVar[str] = ""
    asks: ClassVar[bool] = True  # the question of the row; other tasks ask the same of every row

    def __init__(self, tokenizer: Any, data: Path | None = None, seed: int = 0) -> None:
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
        return map(self.from_hub, self.hub_rows(self.hub[2]))

    def hub_rows(self, split: str) -> Iterator[Row]:
        """The hub's own rows of a split, as they come."""
        datasets = import_extra("datasets", extra="eval", needed_by="a data set of the hub")
        name, configuration, _ = self.hub or ("", None, "")
        try:
            yield from datasets.load_dataset(name, configuration, split=split, streaming=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise PromptError(
                f"the data set {name} cannot be loaded from the hub: {error} Give a JSONL file with --data instead."
            ) from error

    def samples(self, limit: int | None = None, shape: Shape = Shape()) -> list[Sample]:
        """The first samples."""
        if limit is None and self.data is None and self.hub is None:
            raise ConfigError(f"{type(self).__name__} makes samples without end, but no limit is set. Set a limit.")
        samples = (self.sample(self._checked(row)) for row in self.rows())
        return [shape.applied(sample) for sample in islice(filter(None, samples), limit)]

    def _checked(self, row: Row) -> Row:
        if self.asks and not row["question"].strip():
            raise PromptError(f"the sample {row['id']} has no question. Ask one, or use a task that needs none.")
        return row

    def made(self, row: Row, chunks: Iterable[str], question_text: str) -> Sample:
        """A prompt in a user's turn."""
        before, after = self.tags
        pieces = tuple(self.ids(chunk) for chunk in chunks)
        prefix, question = (*before, *self.ids(self.prefix)), (*self.ids(question_text), *after)
        return Sample(str(row["id"]), prefix, pieces, question, tuple(row["answers"]))

    def ids(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece, nothing added."""
        return tokenize(self.tokenizer, text)

    @cached_property
    def tags(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and behind a user's turn, as ids without what the tokenizer puts before a text."""
        if self.ids("[INST]") == INSTRUCTION_IDS[0]:
            return INSTRUCTION_IDS
        if not getattr(self.tokenizer, "chat_template", None):
            return (), ()
        turn = [{"role": "user", "content": "\0"}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        before, after = map(self.ids, text.split("\0", 1))
        front = front_ids(self.tokenizer)
        return before[len(front) :] if before[: len(front)] == front else before, after


class QuestionTask(Task):
    """Short answers to questions over passages, as CacheBlend asks them of 2WikiMultihopQA."""

    prefix = (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words."
        "\n\nThe following are given passages.\n"
    )
    before_question: ClassVar[str] = (
        "\n\nAnswer the question based on the given passages. Answer the question within 5 words. Do NOT repeat the "
        "question or output any other words. Question: "
    )
    between_sentences: ClassVar[str] = ""
    score = "word-f1"
    also = ("exact-match", "subword-f1")

    def sample(self, row: Row) -> Sample:
        """Prefix, passages, and the question with its instruction."""
        chunks = [f"\n\n{chunk}\n\n" for chunk in row["chunks"]]
        return self.made(row, chunks, f"{self.before_question}{polished(row['question'])}\nAnswer:")

    def from_hub(self, row: Row) -> Row:
        """Titles and sentences become passages."""
        context = row["context"]
        pairs = zip(context["title"], context["sentences"], strict=True)
        chunks = [f"{title}\n\n{self.between_sentences.join(sentences)}" for title, sentences in pairs]
        return {"id": row["id"], "chunks": chunks, "question": row["question"], "answers": [row["answer"]]}


def polished(question: str) -> str:
    """A question as CacheBlend writes it: a question mark at the end, the first letter small."""
    question = question if question.endswith("?") else f"{question}?"
    return question[:1].lower() + question[1:]
