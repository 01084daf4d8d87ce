# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions of sequences: what a `SequenceCache` holds as one file, in the form of `hf_blend.cache.session`.

save_session(cache, "chat.session", tokenizer)
load_session(cache, "chat.session", tokenizer)       # in another process, for the same model
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..cache.session import identity, read_session, refusing, write_session
from ..model.author import author_of
from .sequence_cache import SequenceCache

KIND = "hf_blend.session/3"


def save_session(
    cache: SequenceCache,
    path: str | Path,
    tokenizer: Any = None,
) -> int:
    """Write a cache to a file. An existing file is replaced atomically, and stays as it is if writing fails.

    The file names the model that computed the tokens: after a switch of adapters that is not the present one.

    Args:
        cache: a `SequenceCache` or `ShiftCache`.
        path: the file.
        tokenizer: if given, the session can be loaded only with the same tokenizer.

    Returns:
        The size of the file in bytes.

    Raises:
        StoreError: the file cannot be written.
        ConfigError: the tokens were computed under autocast.
        UnsupportedModelError: tokens were computed inside `self_extend`.
    """
    cache.refuse_extended()
    author = cache.author or author_of(cache.model)
    about = identity(cache.model, author, None, _tokenizer_digest(tokenizer))
    return write_session(path, KIND, about, cache.state())


def load_session(
    cache: SequenceCache,
    path: str | Path,
    tokenizer: Any = None,
) -> None:
    """Load a saved cache. If anything is wrong with the file, the cache stays as it was.

    Args:
        cache: of the same model as the saved one.
        path: the file.
        tokenizer: as in `save_session`.

    Raises:
        StoreError: the file is no session of this model and tokenizer, or not what was saved.
    """
    author = author_of(cache.model)._replace(autocast="")
    about = identity(cache.model, author, None, _tokenizer_digest(tokenizer))
    state = read_session(path, KIND, about)
    with refusing(path):
        cache.check_state(state)
        cache.restore(state)


def _tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of a fast tokenizer's whole definition, or of a slow one's class and vocabulary; empty without one."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(content.encode()).hexdigest()
