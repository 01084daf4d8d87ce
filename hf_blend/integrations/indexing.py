# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of batches of rows, in as many processes as an engine starts.

dataset.map(IndexChunks("HuggingFaceTB/SmolLM2-135M-Instruct", "kv-store"), batched=True, num_proc=4)   # datasets
ray_dataset.map_batches(IndexChunks, fn_constructor_args=(model, "/shared/kv"), concurrency=8)           # Ray Data

A chunk that is stored is skipped, so a run that was stopped is simply started again.
"""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from ..errors import StoreError
from ..model_names import load
from ..prompt.pieces import list_chunks
from ..store import ChunkStore
from ..store.opening import absolute

__all__ = ["IndexChunks"]


class IndexChunks:
    """Stores the chunk of each row of a batch: for engines that keep an object in each process and give it batches.

    It is pickled before anything is opened; a process loads the model and opens the store at its first batch.

    Args:
        model: a path or hub id of a causal language model with its tokenizer; or what returns both.
        store: its location, or the arguments of `ChunkStore.open`.
        column: of the rows; it has documents, or lists of token ids.
        threads: of torch in each process; None is torch's default.
    """

    def __init__(
        self,
        model: str | Callable[[], tuple[Any, Any]],
        store: str | PathLike[str] | Mapping[str, Any],
        column: str = "text",
        threads: int | None = None,
    ) -> None:
        settings = dict(store) if isinstance(store, Mapping) else {"location": store}
        if settings.get("location") is not None:
            settings["location"] = absolute(settings["location"])  # an engine's processes work in other folders
        self.model = model
        self.store = settings
        self.column = column
        self.threads = threads
        self._opened: tuple[Any, Any, ChunkStore] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Store the chunks of a batch, a dict of columns; gives the column `digest`, "" of an empty document.

        Raises:
            StoreError: the store did not keep a chunk.
        """
        model, tokenizer, store = self._open()
        rows = batch[self.column]
        if hasattr(rows, "tolist"):  # an array or a column of pandas
            rows = rows.tolist()
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
        chunks = list_chunks(rows, may_be_empty=True)
        filled = [chunk for chunk in chunks if not isinstance(chunk, str) or chunk.strip()]
        keys = iter(store.add(model, tokenizer, filled))
        digests = []
        for chunk in chunks:
            if isinstance(chunk, str) and not chunk.strip():
                digests.append("")
                continue
            key = next(keys)
            if not store.contains(key):
                raise StoreError("the store did not keep a chunk. Make room for it, and run it again.")
            digests.append(key.digest)
        return {"digest": digests}

    def _open(self) -> tuple[Any, Any, ChunkStore]:
        if self._opened is None:
            if self.threads is not None:
                import torch

                torch.set_num_threads(self.threads)
            model, tokenizer = load(self.model) if isinstance(self.model, str) else self.model()
            self._opened = model, tokenizer, ChunkStore.open(**{**self.store, "memory_bytes": 0})
        return self._opened
