# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ray Data: compute and store the chunk of every row, by actors that load the model once each.

    rows = index_ray_dataset(ray.data.read_parquet("corpus"), "HuggingFaceTB/SmolLM2-135M-Instruct", "kv", actors=4)

An actor that dies is started again by Ray, which gives the batch that it had to one that lives; what of it is stored
already is "present" then. On several machines the store is a folder that all of them share, or has a remote tier.
"""

from typing import Any

from ..errors import ConfigError, import_extra
from .indexing import BATCH_ROWS, IndexChunks, Model, Store, refuse_loss

__all__ = ["IndexChunks", "index_ray_dataset"]


def index_ray_dataset(
    dataset: Any,
    model: Model,
    store: Store,
    *,
    column: str = "text",
    actors: int = 1,
    batch_rows: int = BATCH_ROWS,
    threads: int | None = 1,
    **resources: Any,
) -> list[dict[str, str]]:
    """Compute and store the chunk of every row of a Ray dataset that is not stored yet, by so many actors.

    The other arguments are those of `IndexChunks`; `resources` of each actor are as `map_batches` takes them, such as
    `num_gpus=1`. Gives a row for each: `digest`, and `state`: "computed", "present" where it was stored already, or
    "empty".
    For a result that stays in Ray, give `IndexChunks` itself to `Dataset.map_batches`.
    """
    data = import_extra("ray.data", extra="ray", wanted_by="index_ray_dataset")
    if not isinstance(dataset, data.Dataset):
        raise ConfigError(
            f"dataset is of the class {type(dataset).__name__}, expected a ray.data.Dataset. Make one by "
            "ray.data.from_items or ray.data.read_parquet."
        )
    indexed = dataset.map_batches(
        IndexChunks,
        fn_constructor_args=(model, store, column, threads),
        batch_size=batch_rows,
        compute=data.ActorPoolStrategy(size=actors),
        **{"num_cpus": 1, **resources},
    )
    rows: list[dict[str, str]] = indexed.take_all()
    refuse_loss([row["state"] for row in rows])
    return rows
