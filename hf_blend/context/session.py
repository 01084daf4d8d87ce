# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions: a conversation's cache as one file, whole and verified or not used at all.

    save_session(cache, "chat.session", tokenizer)
    load_session(cache, "chat.session", tokenizer)       # in another process, for the same model

A file is a magic line, the sha256 of all that follows, and that: a safetensors image whose metadata says which model,
tokenizer and rotary settings it belongs to. Nothing is believed before all of it was read and compared.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from ..anatomy import text_config
from ..errors import StoreError
from ..fingerprint import fingerprint
from ..store.tiers.base import EntryFault
from ..store.tiers.files import open_regular, write_atomically
from .sequence_cache import SequenceCache

MAGIC = b"hf_blend.session/1\n"
DIGEST_BYTES = hashlib.sha256().digest_size


def save_session(cache: SequenceCache, path: str | Path, tokenizer: Any = None) -> int:
    """Write a cache to a file; a file of that name is replaced at once, or stays as it is if writing fails.

    Args:
        cache: what to save: every sequence, with tokens, positions, K and V.
        path: of the file.
        tokenizer: of the model; where it is given, the file can be loaded only with an equal one.

    Returns:
        The size of the file in bytes.

    Raises:
        StoreError: it cannot be written.
        UnsupportedModelError: some of it was computed inside `self_extend`, or the model is inside.
    """
    cache.refuse_extended()
    tensors = {name: tensor.cpu() for name, tensor in cache.state().items()}
    image = save(tensors, _identity(cache, tokenizer))
    parts = (MAGIC, hashlib.sha256(image).digest(), image)
    try:
        write_atomically(Path(path), parts, durable=True)
    except OSError as error:
        raise StoreError(f"a session cannot be written to {path}: {error}. Check the folder and its space.") from error
    return sum(map(len, parts))


def load_session(cache: SequenceCache, path: str | Path, tokenizer: Any = None) -> None:
    """Let a cache hold what a file holds. If anything is wrong with the file, the cache stays as it was.

    Args:
        cache: for the model that the session was saved with.
        path: of the file.
        tokenizer: as in `save_session`.

    Raises:
        StoreError: the file cannot be read, is damaged, or belongs to another model, tokenizer or rotary setting.
    """
    image = _checked(path, _read(path))
    _compare(path, _metadata(image), _identity(cache, tokenizer))
    cache.restore(load(image))


def _read(path: str | Path) -> bytes:
    try:
        source = open_regular(Path(path))
    except (OSError, EntryFault) as error:
        raise StoreError(f"the session {path} cannot be read: {error}. Give the path of a saved session.") from error
    try:
        content = bytearray(source.stat.nbytes)
        source.read_into(0, memoryview(content))
        return bytes(content)
    except (OSError, EntryFault) as error:
        raise StoreError(f"the session {path} cannot be read: {error}. Save it again.") from error
    finally:
        source.close()


def _checked(path: str | Path, content: bytes) -> bytes:
    """The image inside a file; refused unless every byte is what was written."""
    start = len(MAGIC) + DIGEST_BYTES
    if not content.startswith(MAGIC):
        raise StoreError(f"{path} does not begin as a session of this version does. Give the path of a saved session.")
    if hashlib.sha256(content[start:]).digest() != content[len(MAGIC) : start]:
        raise StoreError(f"the session {path} is not what was saved: its digest does not fit. Save it again.")
    return content[start:]


def _metadata(image: bytes) -> dict[str, str]:
    header: dict[str, Any] = json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _compare(path: str | Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    for name in ("rope", "tokenizer", "model"):  # a rotary setting is part of the model: name it first
        if saved.get(name) != wanted[name]:
            raise StoreError(
                f"the session {path} was saved with another {name} ({saved.get(name)!r:.60}) than this cache's "
                f"({wanted[name]!r:.60}). Load it with the {name} that it was saved with, or prefill anew."
            )


def _identity(cache: SequenceCache, tokenizer: Any) -> dict[str, str]:
    rope = getattr(text_config(cache.model), "rope_parameters", None)
    return {
        "model": fingerprint(cache.model),
        "tokenizer": "" if tokenizer is None else _tokenizer_digest(tokenizer),
        "rope": json.dumps(rope, sort_keys=True, default=str),
    }


def _tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of a fast tokenizer's whole definition, or of a slow one's class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(content.encode()).hexdigest()
