# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of a corpus ahead of time, by one process or by many; what `hf-blend index` does."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.anatomy import default_sink
from hf_blend.model.fingerprint import fingerprint
from hf_blend.store import ChunkKey

from .asking import read_documents, split
from .bundled import quickstart_questions

__all__ = ["Corpus", "Indexed", "Shard", "index"]

SUFFIXES = (".txt", ".md", ".rst")
LINES = ".jsonl"
FIELD = "text"


@dataclass(frozen=True)
class Shard:
    """The chunks that one of several processes computes: those whose digest says so. Processes need not talk.

    Attributes:
        number: of this process, from 0 on.
        count: of all processes.
    """

    number: int = 0
    count: int = 1

    @classmethod
    def find(cls, text: str | None = None) -> "Shard":
        """Find out which share is this process's.

        Args:
            text: such as "0/4"; None asks what launchers leave in the environment, `RANK` and `WORLD_SIZE`.

        Returns:
            The share; all of it for a process that was not launched with others.

        Raises:
            ConfigError: the text is not of this form.
        """
        given = text or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}"
        number, _, count = given.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise ConfigError(f"the shard {given!r} is not NUMBER/COUNT with a number from 0 on, such as 0/4.")
        return cls(int(number), int(count))

    def owns(self, key: ChunkKey) -> bool:
        """Say whether a chunk is this process's."""
        return int(key.digest[:16], 16) % self.count == self.number


class Corpus:
    """Documents in files, in folders of text files, and one by one in the lines of JSONL files.

    Args:
        names: paths; none is the bundled documents.

    Raises:
        PromptError: a path does not exist, or a folder has no text.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._paths = [path for name in names for path in _text_files(Path(name))]
        self._count = sum(_lines(path) if path.suffix == LINES else 1 for path in self._paths)
        self._bundled = [] if names else [text for one in quickstart_questions() for text in one["chunks"]]

    def __len__(self) -> int:
        """How many documents there are."""
        return self._count + len(self._bundled)

    def __iter__(self) -> Iterator[str]:
        """Read one document after the other."""
        yield from self._bundled
        for path in self._paths:
            if path.suffix == LINES:
                yield from _documents(path)
            else:
                yield from read_documents([str(path)], ())


@dataclass
class Indexed:
    """What came of it.

    Attributes:
        documents: how many were read.
        chunks: how many they have, those of other processes and repeated ones too.
        stored: how many this process computed and stored.
        present: how many of its chunks were there already.
        refused: how many it computed, and the store did not keep.
    """

    documents: int = 0
    chunks: int = 0
    stored: int = 0
    present: int = 0
    refused: int = 0


def index(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    documents: Iterable[str],
    chunk_tokens: int,
    shard: Shard = Shard(),
) -> Indexed:
    """Store every chunk of a corpus that is not stored yet. Stopped at any time, it goes on where it was.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        store: receives the chunks.
        documents: texts.
        chunk_tokens: documents are cut into chunks of this many tokens, as `hf-blend ask` cuts them.
        shard: which of the chunks are computed here.

    Returns:
        What was done.
    """
    done = Indexed()
    identity, sink = fingerprint(model), default_sink(model)
    for text in documents:
        done.documents += 1
        for ids in split(tokenizer, text, chunk_tokens):
            done.chunks += 1
            key = ChunkKey(identity, sink, tuple(ids), store.namespace)
            if shard.owns(key):
                _store(model, tokenizer, store, key, done)
    return done


def _store(model: nn.Module, tokenizer: Any, store: ChunkStore, key: ChunkKey, done: Indexed) -> None:
    if store.contains(key):
        done.present += 1
        return
    store.add(model, tokenizer, [key.token_ids], sink_ids=key.sink_ids)
    if store.contains(key):
        done.stored += 1
    else:
        done.refused += 1


def _text_files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.is_file():
            raise PromptError(f"there is no file or folder {str(path)!r}. Give text files, JSONL files, or folders.")
        return [path]
    found = sorted(one for one in path.rglob("*") if one.suffix in (*SUFFIXES, LINES) and one.is_file())
    if not found:
        raise PromptError(f"no file in {str(path)!r} ends in {', '.join((*SUFFIXES, LINES))}. Name the files.")
    return found


def _lines(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(bool(line.strip()) for line in lines)


def _documents(path: Path) -> Iterator[str]:
    """The lines of a JSONL file: texts, or objects with a field `text`."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _document(f"{path}:{number}", line)


def _document(place: str, line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place} is not JSON: {error}. Write one text, or one object, on each line.") from error
    text = found.get(FIELD) if isinstance(found, dict) else found
    if not isinstance(text, str):
        raise PromptError(f"{place} is {line.strip()[:60]!r}, wanted a text or an object with a field {FIELD!r}.")
    return text
