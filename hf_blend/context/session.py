# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sessions: a conversation's cache as one file, whole and verified or not used at all.

    save_session(cache, "chat.session", tokenizer)
    load_session(cache, "chat.session", tokenizer)       # in another process, for the same model

The texts in the header of a file (see `store.format`) say which model, tokenizer and rotary settings it belongs to.
Nothing is used before all of it was read and compared: the seal of the header before anything is parsed, then the
digests, then the texts, then names, shapes, dtypes and values with those of the model.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ..cache.quantised_layer import forms, is_grouping
from ..errors import ConfigError, StoreError
from ..model.anatomy import text_config
from ..model.author import Author, author_of
from ..prefill.layout import layout_of
from ..prompt.history import UNKNOWN
from ..store.chunk import Layout, has_usable_values
from ..store.format import EntryFile, pack_entry
from ..store.seal import check_secret
from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.files import open_regular, write_atomically
from .sequence_cache import SequenceCache
from .state_cache import StateCache

KIND = "hf_blend.session/3"
BESIDE = "conversation"  # messages and turns, as bytes
_SEQUENCE = re.compile(r"sequence\.(0|[1-9][0-9]{0,8})")
_END = 1 << 31  # of ids and positions


def save_session(
    cache: SequenceCache | StateCache,
    path: str | Path,
    tokenizer: Any = None,
    *,
    secret: bytes | None = None,
    sequence: int | None = None,
    conversation: bytes = b"",
) -> int:
    """Write a cache to a file; a file of that name is replaced at once, or stays as it is if writing fails.

    The file says which model computed what it holds: after a switch of adapters that is not the one which saves.
    `conversation` is what a `Conversation` keeps beside its cache.
    """
    check_secret(secret)
    cache.refuse_extended()
    state, author = cache.state(sequence), cache.computed_by(sequence) or author_of(cache.model)
    if conversation:
        state[BESIDE] = torch.frombuffer(bytearray(conversation), dtype=torch.uint8)
    parts = pack_entry(KIND, _identity(cache, tokenizer, author), state.items(), secret)
    try:
        write_atomically(Path(path), parts, durable=True)
        return sum(map(len, parts))
    except OSError as error:
        raise StoreError(f"a session cannot be written to {path}: {error}. Check the folder and its space.") from error


def load_session(
    cache: SequenceCache | StateCache,
    path: str | Path,
    tokenizer: Any = None,
    *,
    secret: bytes | None = None,
    sequence: int | None = None,
) -> None:
    """Let a cache hold what a file holds. If anything is wrong with the file, the cache stays as it was.

    With `sequence` the file's only sequence is taken up as this one, and the others stay; else the cache holds what
    the file holds and nothing else.
    """
    read_session(cache, path, tokenizer, secret=secret).restore(sequence)


@dataclass(frozen=True)
class Session:
    """What a file holds for a cache, which stays as it was until `restore`."""

    cache: SequenceCache | StateCache
    path: str | Path
    author: Author  # who computed it
    state: dict[str, Tensor]
    conversation: bytes  # empty where a bare cache was saved

    def restore(self, sequence: int | None = None) -> None:
        """Let the cache, or a sequence of it, hold this."""
        with self.refusing():
            if sequence is None or isinstance(self.cache, StateCache):
                return self.cache.restore(self.state, self.author)
        sequences = sum(name.startswith("sequence.") for name in self.state)
        if sequences != 1:
            raise ConfigError(
                f"the session {self.path} holds {sequences} sequences, but one is expected to become sequence "
                f"{sequence}. Save it with save_session(..., sequence=...), or load all of it into an empty cache."
            )
        with self.refusing():
            self.cache.adopt(self.state, sequence, self.author)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse the file for whatever goes wrong with its content."""
        try:
            with as_fault("its content"):
                yield
        except EntryFault as fault:
            raise StoreError(
                f"the session {self.path} holds what no session of this model holds: {fault}. Save it again, or "
                "prefill again."
            ) from fault


def read_session(
    cache: SequenceCache | StateCache, path: str | Path, tokenizer: Any = None, *, secret: bytes | None = None
) -> Session:
    """Read and verify what a file holds for a cache, as `load_session` does."""
    check_secret(secret)
    (about, state), author = _read(path, secret), author_of(cache.model)._replace(autocast="")
    identity = _identity(cache, tokenizer, author)
    _compare(path, about, identity)
    beside = state.pop(BESIDE, None)
    session = Session(cache, path, author, state, b"" if beside is None else beside.numpy().tobytes())
    with session.refusing():
        if isinstance(cache, StateCache):
            cache.check_state(state)
        else:
            _check_state(state, layout_of(cache.model, identity["model"]), cache.kv_bits)
    return session


def _read(path: str | Path, secret: bytes | None) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """The texts and tensors of a file; refused unless every byte is what was written."""
    try:
        with contextlib.closing(open_regular(Path(path))) as source:
            file = EntryFile(source, KIND, secret)
            return file.header.about, file.tensors()
    except OSError as error:
        raise StoreError(f"the session {path} cannot be read: {error}. Give the path of a saved session.") from error
    except EntryFault as fault:
        raise StoreError(
            f"the session {path} is not what was saved: {fault}. Save it again, give the secret it was saved with, or "
            "the path of a session of this version."
        ) from fault


def _check_state(state: dict[str, Tensor], layout: Layout, kv_bits: int | None) -> None:
    """Raise EntryFault for tensors that a cache of this layout cannot hold."""
    cells = state["ids"].numel()
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"active": ((), torch.int64)}
    expected |= dict.fromkeys(("ids", "origins"), ((cells,), torch.int64))
    expected |= {} if kv_bits is None else {"kv_bits": ((), torch.int64)}
    for index, pair in enumerate(layout.layers if cells else ()):
        packed = state["layer.0.groups"].numel() if kv_bits else 0
        groups = state[f"layer.{index}.k.scale"].shape[1] if kv_bits else 0
        parts = forms(kv_bits, pair, (packed, groups, cells - packed))
        expected |= {f"layer.{index}.{name}": form for name, form in parts.items()}
    rows = [tensor for name, tensor in state.items() if _SEQUENCE.fullmatch(name)]
    sequences = {name: ((2, state[name].shape[-1]), torch.int64) for name in state if _SEQUENCE.fullmatch(name)}
    stored = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    if stored != expected | sequences:
        raise EntryFault(
            "layout", f"names, shapes or dtypes of {len(state)} tensors are not those of this model's layers"
        )
    bounds = [(state["ids"], UNKNOWN, _END), (state["origins"], 0, _END), (state["active"], 0, _END)]
    bounds += [(row[0], 0, cells) for row in rows] + [(row[1], 0, _END) for row in rows]
    if not all(low <= int(values.min()) and int(values.max()) < end for values, low, end in bounds if values.numel()):
        raise EntryFault("values", f"of {cells} cells one holds a token or a position that cannot be")
    if any(len(row[0].unique()) < row.shape[1] for row in rows):
        raise EntryFault("values", f"of {len(rows)} sequences one holds a cell twice")
    groups_of = {name: tensor for name, tensor in state.items() if name.endswith(".groups")}
    if not all(is_grouping(of, state[name.replace("groups", "k.scale")].shape[1]) for name, of in groups_of.items()):
        raise EntryFault("values", f"of {cells} cells one has the scales of a group that cannot be")
    floats = [tensor for name, tensor in state.items() if name.startswith("layer.") and tensor.is_floating_point()]
    if not all(map(has_usable_values, floats)):
        raise EntryFault("values", f"keys or values of {cells} cells are NaN, infinite or absurd")


def _compare(path: str | Path, saved: Mapping[str, str], expected: dict[str, str]) -> None:
    for name in (
        "rope",
        "tokenizer",
        "model",
        "kv_bits",
        "transformers",
    ):  # a rotary setting is part of the model: name it first
        if saved.get(name) != expected.get(name):
            raise StoreError(
                f"the session {path} was saved with another {name} ({saved.get(name)!r:.60}) than this cache's "
                f"({expected.get(name)!r:.60}). Load it with the {name} that it was saved with, or prefill again."
            )


def _identity(cache: SequenceCache | StateCache, tokenizer: Any, author: Author) -> dict[str, str]:
    rope = getattr(text_config(cache.model), "rope_parameters", None)
    return {
        "model": author.stored_name(),
        "tokenizer": "" if tokenizer is None else _tokenizer_digest(tokenizer),
        "rope": json.dumps(rope, sort_keys=True, default=str),
        **({} if cache.kv_bits is None else {"kv_bits": str(cache.kv_bits)}),
        **(
            {"transformers": transformers.__version__} if isinstance(cache, StateCache) else {}
        ),  # whose states these are
    }


def _tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of a fast tokenizer's whole definition, or of a slow one's class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    content = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    return hashlib.sha256(content.encode()).hexdigest()
