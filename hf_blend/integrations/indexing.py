# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a process does with a batch of rows: compute and store the chunk of each, whatever engine hands out batches.

A chunk that is stored costs a look at the store, so a run that was stopped, or killed, is simply started again. Before
a process computes a chunk it takes a lock in the store's folder, which the system releases when the process ends: no
two processes compute the same chunk, on one machine or on several that share the folder.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import StoreError
from ..model_names import locate
from ..store import ChunkKey, ChunkStore

__all__ = ["BATCH_ROWS", "IndexChunks", "Model", "Store", "refuse_loss"]

STRIPES = 3  # hex digits of a digest that share a lock: 4096 locks
BATCH_ROWS = 64
Model = str | Callable[[], tuple[Any, Any]]
Store = str | PathLike[str] | Mapping[str, Any]


class IndexChunks:
    """Stores the chunk of each row of a batch: for engines that keep an object in each process and give it batches.

    It is pickled before anything is opened; a process loads the model and opens the store at its first batch.

    Args:
        model: a path or hub id of a causal language model with its tokenizer; or what returns both, the tokenizer
            None where rows are token ids.
        store: location of the store, or the arguments of `ChunkStore.open`.
        column: of texts, or of lists of token ids, none empty: one chunk for each row.
        threads: of torch in each process; None leaves them as they are.
    """

    def __init__(self, model: Model, store: Store, column: str = "text", threads: int | None = None) -> None:
        self._given, self._column, self._threads = (model, store), column, threads
        self._opened: tuple[Any, Any, ChunkStore, Path | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Store the chunks of a batch.

        Args:
            batch: columns by name: lists, arrays of NumPy, or a frame of pandas.

        Returns:
            For each row its `digest`, and `state`: "computed", "present" where it was stored already, or "refused"
            where the store did not keep it.
        """
        model, tokenizer, store, locks = self._open()
        rows = [_plain(row) for row in _plain(batch[self._column])]
        keys = store.keys(model, tokenizer, rows)
        states = [_store_one(model, tokenizer, store, locks, key, row) for key, row in zip(keys, rows, strict=True)]
        return {"digest": [key.digest for key in keys], "state": states}

    def close(self) -> None:
        """Close the store, if this process opened it."""
        if self._opened is not None:
            self._opened[2].close()

    def _open(self) -> tuple[Any, Any, ChunkStore, Path | None]:
        if self._opened is None:
            if self._threads is not None:
                import torch

                torch.set_num_threads(self._threads)
            source, place = self._given
            model, tokenizer = _loaded(source) if isinstance(source, str) else source()
            settings = dict(place) if isinstance(place, Mapping) else {"location": place}
            store = ChunkStore.open(**{**settings, "memory_bytes": 0})
            roots = [Path(tier.root) for tier in store.tiers() if hasattr(tier, "root") and tier.is_local]
            self._opened = model, tokenizer, store, roots[0] / "claims" if roots else None
        return self._opened


def _loaded(source: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = locate(source)
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def _store_one(
    model: Any, tokenizer: Any, store: ChunkStore, locks: Path | None, key: ChunkKey, chunk: str | Sequence[int]
) -> str:
    if store.contains(key):
        return "present"
    with _claim(locks, key.digest):
        if store.contains(key):
            return "present"
        store.add(model, tokenizer, [chunk])
        return "computed" if store.contains(key) else "refused"


def _claim(locks: Path | None, digest: str) -> contextlib.AbstractContextManager[Any]:
    """The right to compute a chunk; a store without a folder on this machine has no place to ask for it."""
    if locks is None:
        return contextlib.nullcontext()
    locks.mkdir(mode=0o700, exist_ok=True)
    return FileLock(locks / f"{digest[:STRIPES]}.lock")


def refuse_loss(states: Sequence[str]) -> None:
    """Raise StoreError if the store did not keep a chunk."""
    if refused := sum(state == "refused" for state in states):
        raise StoreError(
            f"the store did not keep {refused} of {len(states)} chunks. Make room for them, and run it again."
        )


def _plain(values: Any) -> Any:
    """A list in place of an array."""
    return values.tolist() if hasattr(values, "tolist") else values
