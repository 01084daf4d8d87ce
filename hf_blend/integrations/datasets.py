# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets: compute and store the chunk of every row, in as many processes as `Dataset.map` starts.

    rows = index_dataset(dataset, "HuggingFaceTB/SmolLM2-135M-Instruct", "kv-store", num_proc=4)

A chunk that is stored costs a look at the store, so a run that was stopped, or killed, is simply started again. Before
a process computes a chunk it takes a lock in the store's folder, which the system releases when the process ends: no
two processes compute the same chunk, on one machine or on several that share the folder.
"""

import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import ConfigError, StoreError, import_extra, suggest
from ..model_names import locate
from ..store import ChunkKey, ChunkStore

__all__ = ["index_dataset"]

STRIPES = 3  # hex digits of a digest that share a lock: 4096 locks
BATCH_ROWS = 64
Model = str | Callable[[], tuple[Any, Any]]
Store = str | PathLike[str] | Mapping[str, Any]


def index_dataset(
    dataset: Any,
    model: Model,
    store: Store,
    *,
    column: str = "text",
    num_proc: int | None = None,
    batch_rows: int = BATCH_ROWS,
    threads: int = 1,
) -> Any:
    """Compute and store the chunk of every row that is not stored yet.

    Each process loads the model and opens the store once. With several processes, call this before the model runs in
    the calling one: a forked child cannot use threads of torch that are there already.

    Args:
        dataset: a `datasets.Dataset`.
        model: a path or hub id of a causal language model with its tokenizer; or what returns both, the tokenizer
            None where rows are token ids.
        store: location of the store, or the arguments of `ChunkStore.open`, such as a plan's.
        column: of texts, or of lists of token ids, none empty: one chunk for each row.
        num_proc: processes; None computes in this one.
        batch_rows: rows that a process is given at a time.
        threads: of torch in each process; left as it is where there is one.

    Returns:
        A dataset with a row for each: `digest`, and `state`: "computed", or "present" where it was stored already.

    Raises:
        MissingExtraError: datasets is not installed.
        ConfigError: it is no `datasets.Dataset` or lacks the column, or a number makes no sense.
        StoreError: the store did not keep every chunk: make room, and start again.
        PromptError: as `ChunkStore.add`.
    """
    _check(dataset, column, num_proc=num_proc, batch_rows=batch_rows, threads=threads)
    if not len(dataset):  # datasets would not ask for a row, and give no columns
        return type(dataset).from_dict({"digest": [], "state": []})
    worker = _Worker(model, store, column, threads if num_proc and num_proc > 1 else None)
    rows = dataset.map(
        worker,
        batched=True,
        batch_size=batch_rows,
        num_proc=num_proc if num_proc and num_proc > 1 else None,
        remove_columns=dataset.column_names,
        load_from_cache_file=False,  # what is stored is known to the store alone
        new_fingerprint=secrets.token_hex(16),
    )
    worker.close()
    states = Counter(rows["state"])
    if states["refused"]:
        raise StoreError(
            f"the store did not keep {states['refused']} of {len(rows)} chunks. Make room for them, and run it again."
        )
    return rows


def _check(dataset: Any, column: str, **counts: int | None) -> None:
    """Refuse here what would fail in datasets, or in each process."""
    kind = import_extra("datasets", extra="eval", wanted_by="index_dataset").Dataset
    if not isinstance(dataset, kind):
        raise ConfigError(
            f"dataset is of the class {type(dataset).__name__}, expected a datasets.Dataset. Pass one of its splits, "
            'as load_dataset(..., split="train") gives it.'
        )
    if column not in dataset.column_names:
        raise ConfigError(f"the dataset has no column {column!r}. {suggest(str(column), dataset.column_names)}")
    for name, count in counts.items():
        least = 0 if name == "num_proc" else 1
        if count is not None and (type(count) is not int or count < least):
            raise ConfigError(f"{name} is {count!r}, expected a whole number from {least} on. Leave it out.")


class _Worker:
    """What a process does with a batch of rows; it is pickled before anything is opened."""

    def __init__(self, model: Model, store: Store, column: str, threads: int | None) -> None:
        self._given, self._column, self._threads = (model, store), column, threads
        self._opened: tuple[Any, Any, ChunkStore, Path | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Store the chunks of a batch; gives their digests and what was done."""
        model, tokenizer, store, locks = self._open()
        keys = store.keys(model, tokenizer, batch[self._column])
        chunks = zip(keys, batch[self._column], strict=True)
        states = [_store_one(model, tokenizer, store, locks, key, chunk) for key, chunk in chunks]
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
