# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions of sequences: what a `SequenceCache` holds as one file, in the form of `hf_blend.cache.session`.

save_session(cache, "chat.session")
load_session(cache, "chat.session")       # in another process, for the same model
"""

from pathlib import Path

from ..cache.session import identity, read_session, refusing, write_session
from ..model.identity import author_of
from .sequence_cache import SequenceCache

KIND = "hf_blend.session/3"


def save_session(cache: SequenceCache, path: str | Path) -> int:
    """Write a cache to a file. An existing file is replaced atomically, and stays as it is if writing fails.

    The file names the model that computed the tokens: after a switch of adapters that is not the present one.

    Args:
        cache: a `SequenceCache` or `ShiftCache`.
        path: the file.

    Returns:
        The size of the file in bytes.

    Raises:
        StoreError: the file cannot be written.
        ConfigError: the tokens were computed under autocast.
        UnsupportedModelError: tokens were computed inside `self_extend`.
    """
    cache.refuse_extended()
    author = cache.author or author_of(cache.model)
    return write_session(path, KIND, identity(cache.model, author), cache.state())


def load_session(cache: SequenceCache, path: str | Path) -> None:
    """Replace all that a cache holds by a saved one. If anything is wrong with the file, the cache stays as it was.

    Args:
        cache: of the same model as the saved one.
        path: the file.

    Raises:
        StoreError: the file is no session of this model, or not what was saved.
    """
    author = author_of(cache.model)._replace(autocast="", is_training=False)
    state = read_session(path, KIND, identity(cache.model, author))
    with refusing(path):
        cache.check_state(state)
        cache.restore(state)
