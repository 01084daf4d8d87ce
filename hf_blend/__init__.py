# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reuse the KV cache of RAG chunks inside stock Hugging Face models, recomputing only the tokens that need it.

Public names are imported when first used, so that `import hf_blend` costs nothing and changes nothing.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .cache.blend_cache import BlendCache
    from .config import BlendConfig
    from .context.self_extend import self_extend
    from .context.sequence_cache import SequenceCache, ShiftCache
    from .errors import (
        ConfigError,
        HfBlendError,
        MissingExtraError,
        OffloadError,
        PluginNotFoundError,
        PromptError,
        StoreError,
        UnsupportedModelError,
    )
    from .generate import blended
    from .model.identity import observer
    from .model_names import load
    from .sparse.decoding import sparse_decoding
    from .store import ChunkStore

__all__ = [
    "BlendCache",
    "BlendConfig",
    "ChunkStore",
    "ConfigError",
    "HfBlendError",
    "MissingExtraError",
    "OffloadError",
    "PluginNotFoundError",
    "PromptError",
    "SequenceCache",
    "ShiftCache",
    "StoreError",
    "UnsupportedModelError",
    "__version__",
    "blended",
    "load",
    "observer",
    "self_extend",
    "sparse_decoding",
]

_HOMES = {  # the others live in errors
    "BlendCache": "cache.blend_cache",
    "BlendConfig": "config",
    "ChunkStore": "store",
    "SequenceCache": "context.sequence_cache",
    "ShiftCache": "context.sequence_cache",
    "blended": "generate",
    "load": "model_names",
    "observer": "model.identity",
    "self_extend": "context.self_extend",
    "sparse_decoding": "sparse.decoding",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Import a public name from its home when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f".{_HOMES.get(name, 'errors')}", __name__)
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted(__all__)
