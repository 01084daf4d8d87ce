# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions: what a cache holds as one file, which is verified whole before anything of it is used.

    save_session(cache, "chat.session", tokenizer)
    load_session(cache, "chat.session", tokenizer)       # in another process, for the same model

The header of the file (see `store.format`) names the model, tokenizer and rotary settings that it belongs to. The
checks come in this order: the seal of the header, before anything is parsed; the digests of the tensors; the model,
tokenizer and settings; the names, shapes, dtypes and values of the tensors, which the cache itself checks.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import ConfigError, StoreError
from ..model.anatomy import text_config
from ..model.author import Author, author_of
from ..store.format import EntryFile, pack_entry
from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.files import open_regular, write_atomically
from .sequence_cache import SequenceCache

KIND = "hf_blend.session/3"
COMPARED = ("rope", "tokenizer", "model", "kv_bits")  # rope first: it is also a part of the model


def save_session(
    cache: SequenceCache,
    path: str | Path,
    tokenizer: Any = None,
    *,
    sequence: int | None = None,
) -> int:
    """Write a cache to a file. An existing file is replaced atomically, and stays as it is if writing fails.

    The file names the model that computed the tokens: after a switch of adapters that is not the present one.

    Args:
        cache: a `SequenceCache` or `ShiftCache`.
        path: the file.
        tokenizer: if given, the session can be loaded only with the same tokenizer.
        sequence: save only this sequence; None saves the whole cache.

    Returns:
        the size of the file in bytes.

    Raises:
        StoreError: the file cannot be written.
        ConfigError: there is no such sequence, or several models computed the tokens.
        UnsupportedModelError: tokens were computed inside `self_extend`.
    """
    cache.refuse_extended()
    state, author = cache.state(sequence), cache.computed_by(sequence) or author_of(cache.model)
    parts = pack_entry(KIND, _identity(cache, tokenizer, author), state.items())
    try:
        write_atomically(Path(path), parts, durable=True)
        return sum(map(len, parts))
    except OSError as error:
        raise StoreError(f"a session cannot be written to {path}: {error}. Check the folder and its space.") from error


def load_session(
    cache: SequenceCache,
    path: str | Path,
    tokenizer: Any = None,
    *,
    sequence: int | None = None,
) -> None:
    """Load a saved cache. If anything is wrong with the file, the cache stays as it was.

    Args:
        cache: of the same kind, model and `kv_bits` as the saved one.
        path: the file.
        tokenizer: as in `save_session`.
        sequence: load the file's only sequence as this one, beside the others; None replaces all that the cache holds.

    Raises:
        StoreError: the file is no session of this model and tokenizer, or not what was saved.
        ConfigError: `sequence` is given, and the file holds several.
    """
    read_session(cache, path, tokenizer).restore(sequence)


@dataclass(frozen=True)
class Session:
    """A verified session of a cache, which stays as it is until `restore`."""

    cache: SequenceCache
    path: str | Path
    author: Author  # who computed it
    state: dict[str, Tensor]

    def restore(self, sequence: int | None = None) -> None:
        """Load it into the cache, or into one sequence of the cache."""
        sequences = sum(name.startswith("sequence.") for name in self.state)
        if sequence is not None and sequences != 1:
            raise ConfigError(
                f"the session {self.path} holds {sequences} sequences, but one is expected to become sequence "
                f"{sequence}. Save it with save_session(..., sequence=...), or load all of it into an empty cache."
            )
        with self.refusing():
            self.cache.restore(self.state, self.author, sequence)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn any error about the file's content into a StoreError that names the file."""
        try:
            with as_fault("its content"):
                yield
        except EntryFault as fault:
            raise StoreError(
                f"the session {self.path} holds what no session of this model holds: {fault}. Save it again, or "
                "prefill again."
            ) from fault


def read_session(
    cache: SequenceCache, path: str | Path, tokenizer: Any = None
) -> Session:
    """Read and verify a file as `load_session` does, without changing the cache."""
    (about, state), author = _read(path), author_of(cache.model)._replace(autocast="")
    _compare(path, about, _identity(cache, tokenizer, author))
    session = Session(cache, path, author, state)
    with session.refusing():
        cache.check_state(state)
    return session


def _read(path: str | Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """The texts and tensors of a file; refused unless every byte is what was written."""
    try:
        with contextlib.closing(open_regular(Path(path))) as source:
            file = EntryFile(source, KIND)
            return file.header.about, file.tensors()
    except OSError as error:
        raise StoreError(f"the session {path} cannot be read: {error}. Give the path of a saved session.") from error
    except EntryFault as fault:
        raise StoreError(
            f"the session {path} is not what was saved: {fault}. Save it again, or give "
            "the path of a session of this version."
        ) from fault


def _compare(path: str | Path, saved: Mapping[str, str], expected: dict[str, str]) -> None:
    for name in COMPARED:
        if saved.get(name) != expected.get(name):
            raise StoreError(
                f"the session {path} was saved with another {name} ({saved.get(name)!r:.60}) than this cache's "
                f"({expected.get(name)!r:.60}). Load it with the {name} that it was saved with, or prefill again."
            )


def _identity(cache: SequenceCache, tokenizer: Any, author: Author) -> dict[str, str]:
    rope = getattr(text_config(cache.model), "rope_parameters", None)
    identity = {
        "model": author.stored_name(),
        "tokenizer": "" if tokenizer is None else _tokenizer_digest(tokenizer),
        "rope": json.dumps(rope, sort_keys=True, default=str),
        "kv_bits": "" if cache.kv_bits is None else str(cache.kv_bits),
    }
    return {name: text for name, text in identity.items() if text or name == "tokenizer"}


def _tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of a fast tokenizer's whole definition, or of a slow one's class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(content.encode()).hexdigest()
