# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored chunks as accelerate's offload index sees them: every tensor of every file, by name, where it is.

    from accelerate.utils import OffloadedWeightsLoader

    loader = OffloadedWeightsLoader(index=offload_index(store))
    keys = loader[f"{chunk_key.digest}.layer.0.k"]

Our own writer stays: accelerate's leaves torn files behind when it is killed. What accelerate reads it does not
verify, so each entry is verified, once, before it is listed; the library itself never reads this way.
"""

from .store import ChunkStore

__all__ = ["offload_index"]


def offload_index(store: ChunkStore) -> dict[str, dict[str, str]]:
    """List the tensors of all whole entries on disk, of this store's namespace.

    Shape: `[kv_heads, tokens, head_dim]`.
    """
    from safetensors import safe_open

    index = {}
    for digest, path in store.files():
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                index[f"{digest}.{name}"] = {"safetensors_file": str(path), "weight_name": name}
    return index
