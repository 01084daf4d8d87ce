# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face datasets: compute and store the chunk of every row, in as many processes as `Dataset.map` starts.

rows = index_dataset(dataset, "HuggingFaceTB/SmolLM2-135M-Instruct", "kv-store", num_proc=4)
"""

import secrets
from typing import Any

from ..errors import ConfigError, import_extra, suggest
from .indexing import BATCH_ROWS, IndexChunks, Model, Store, refuse_loss

__all__ = ["index_dataset"]


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
    """Compute and store the chunk of every row of a `datasets.Dataset` that is not stored yet.

    `model`, `store` and `column` are as in `IndexChunks`. Each process loads the model and opens the store once. With
    several processes, call this before the model runs in the calling one: a forked child cannot use threads of torch
    that are there already. Gives a dataset with a row for each: `digest`, and `state`: "computed", "present" where it
    was stored already, or "empty".
    """
    _check(dataset, column, num_proc=num_proc, batch_rows=batch_rows, threads=threads)
    if not len(dataset):  # datasets would not ask for a row, and give no columns
        return type(dataset).from_dict({"digest": [], "state": []})
    worker = IndexChunks(model, store, column, threads if num_proc and num_proc > 1 else None)
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
    refuse_loss(rows["state"])
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
