# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of batches of rows, in one or many processes, by any engine that hands out batches.

A chunk that is stored is skipped, so a run that was stopped, or killed, is simply started again. Before a process
computes a chunk it takes a lock in the store's folder, which the system releases when the process ends: no two
processes compute the same chunk, on one machine or on several that share the folder. The chunks of a batch whose locks
are free are computed together, several in one forward; those that other processes have locked come afterwards.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import StoreError
from ..model_names import locate
from ..prompt.pieces import Piece, list_chunks
from ..store import ChunkKey, ChunkStore

__all__ = ["BATCH_ROWS", "IndexChunks", "Model", "Store", "refuse_loss"]

logger = logging.getLogger(__name__)

STRIPES = 3  # hex digits of a digest that share a lock: 4096 locks
BATCH_ROWS = 64
Model = str | Callable[[], tuple[Any, Any]]
Store = str | PathLike[str] | Mapping[str, Any]


class IndexChunks:
    """Stores the chunk of each row of a batch: for engines that keep an object in each process and give it batches.

    It is pickled before anything is opened; a process loads the model and opens the store at its first batch. The
    model is a path or hub id of a causal language model with its tokenizer; or what returns both, the tokenizer None
    where rows are token ids. The store is its location, or the arguments of `ChunkStore.open`. The column holds
    documents, or lists of token ids, none empty.
    """

    def __init__(self, model: Model, store: Store, column: str = "text", threads: int | None = None) -> None:
        self._model, self._store, self._column, self._threads = model, store, column, threads
        self._opened: tuple[Any, Any, ChunkStore, Path | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Store the chunks of a batch, a dict of columns; return the columns `digest` and `state`.

        The state is "computed", "present" if the chunk was stored already, "refused" if the store did not keep it, or
        "empty" if the document has no text: then there is no digest, and a warning counts such rows.
        """
        chunks = list_chunks([_plain(row) for row in _plain(batch[self._column])], may_be_empty=True)
        empty = [isinstance(chunk, str) and not chunk.strip() for chunk in chunks]
        if any(empty):
            logger.warning(f"{sum(empty)} of {len(chunks)} rows are empty and left out.")
        filled = iter(self._stored([chunk for chunk, is_empty in zip(chunks, empty, strict=True) if not is_empty]))
        pairs = [("", "empty") if is_empty else next(filled) for is_empty in empty]
        return {"digest": [digest for digest, _ in pairs], "state": [state for _, state in pairs]}

    def _stored(self, rows: Sequence[Piece]) -> list[tuple[str, str]]:
        """Store the chunks of rows; return the digest and the state of each."""
        model, tokenizer, store, locks = self._open()
        keys = store.keys(model, tokenizer, rows)
        states = dict.fromkeys(keys, "present")
        missing = {key: row for key, row in zip(keys, rows, strict=True) if not store.contains(key)}
        while missing:
            with _claimed(locks, missing) as mine:
                absent = [key for key in mine if not store.contains(key)]
                store.add(model, tokenizer, [missing[key] for key in absent])
            states |= {key: "computed" if store.contains(key) else "refused" for key in absent}
            missing = {key: row for key, row in missing.items() if key not in mine}
        rows_done = []
        for key in keys:
            rows_done.append((key.digest, states[key]))
            states[key] = states[key].replace("computed", "present")  # for another row of the same chunk
        return rows_done

    def close(self) -> None:
        """Close the store, if this process opened it."""
        if self._opened is not None:
            self._opened[2].close()

    def _open(self) -> tuple[Any, Any, ChunkStore, Path | None]:
        if self._opened is None:
            if self._threads is not None:
                import torch

                torch.set_num_threads(self._threads)
            model, tokenizer = _loaded(self._model) if isinstance(self._model, str) else self._model()
            settings = dict(self._store) if isinstance(self._store, Mapping) else {"location": self._store}
            store = ChunkStore.open(**{**settings, "memory_bytes": 0})
            roots = [Path(tier.root) for tier in store.tiers() if hasattr(tier, "root") and tier.is_local]
            self._opened = model, tokenizer, store, roots[0] / "claims" if roots else None
        return self._opened


def _loaded(source: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = locate(source)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@contextlib.contextmanager
def _claimed(locks: Path | None, keys: Iterable[ChunkKey]) -> Iterator[set[ChunkKey]]:
    """Lock chunks that this process is to compute: those whose locks are free; if there are none, wait for one lock.

    A store without a folder on this machine has no locks. Nothing waits for a lock while it holds another.
    """
    if locks is None:
        yield {*keys}
        return
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    shared: dict[str, set[ChunkKey]] = {}
    for key in keys:
        shared.setdefault(key.digest[:STRIPES], set()).add(key)
    mine = set[ChunkKey]()
    with contextlib.ExitStack() as stack:
        for stripe, chunks in shared.items():
            with contextlib.suppress(Timeout):
                stack.enter_context(FileLock(locks / f"{stripe}.lock").acquire(blocking=False))
                mine |= chunks
        if not mine:
            stripe, mine = next(iter(shared.items()))
            stack.enter_context(FileLock(locks / f"{stripe}.lock"))
        yield mine


def refuse_loss(states: Sequence[str]) -> None:
    """Raise StoreError if the store did not keep a chunk."""
    if refused := sum(state == "refused" for state in states):
        raise StoreError(
            f"the store did not keep {refused} of {len(states)} chunks. Make room for them, and run it again."
        )


def _plain(values: Any) -> Any:
    """Return a list for an array."""
    return values.tolist() if hasattr(values, "tolist") else values
