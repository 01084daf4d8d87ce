# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where chunk KV is kept. Nothing is imported until it is asked for.

The store of this room knows no model. `ChunkStore`, which users open, is that store and what computes its chunks; it
lives above, in `hf_blend.chunk_store`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..chunk_store import ChunkStore
    from .chunk import ChunkKey, ChunkKV
    from .store import EntryInfo

__all__ = ["ChunkKV", "ChunkKey", "ChunkStore", "EntryInfo"]

_HOMES = {"ChunkKey": ".chunk", "ChunkKV": ".chunk", "ChunkStore": "..chunk_store", "EntryInfo": ".store"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
