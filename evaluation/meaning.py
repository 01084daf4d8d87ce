# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pieces ranked by what they mean, by the vectors of a sentence encoder, which are computed once and kept.

They are beside the chunks of a store on this machine: a folder for each encoder, in it a file for each document, in it
the vectors of each piece under the digest of its text. A piece that is longer than the encoder reads has several.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError, import_extra
from hf_blend.store.tiers.files import write_atomically

from .bundled import AUTO, choose_device, first_line
from .retrieving import Piece
from .sources import beside, vectors_file

BATCH = 32
SPARE_TOKENS = 16  # of what an encoder reads: its own special tokens and its prompt for documents
READ = (".json", ".txt", ".model", ".safetensors", ".bin")  # files of an encoder that say what vectors it gives
MOST_KEPT = 4096  # texts whose vectors an encoder remembers
Watch = Callable[[Iterable[Any]], Iterable[Any]]


class Encoder:
    """A sentence encoder in the hub's cache or in a folder; nothing is fetched, and no code of a model is run.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        ConfigError: there is no such encoder here.
    """

    def __init__(self, name: str, device: str = AUTO) -> None:
        library = import_extra("sentence_transformers", extra="meaning", wanted_by="retrieval by meaning")
        self.folder = _folder(name)
        if not (self.folder / "modules.json").is_file():
            raise ConfigError(
                f"{name!r} is no sentence encoder: it has no modules.json. Give one that sentence-transformers or "
                "model2vec saved, such as sentence-transformers/all-MiniLM-L6-v2."
            )
        try:
            self._model = library.SentenceTransformer(
                str(self.folder), device=str(choose_device(device)), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # of the library, of transformers, of tokenizers
            raise ConfigError(
                f"the encoder {name!r} cannot be loaded: {first_line(error)} Give the folder of another, or the id of "
                "one in the hub's cache."
            ) from error
        self._kept: dict[str, np.ndarray] = {}

    @cached_property
    def identity(self) -> str:
        """What tells an encoder from all others: the digest of its files."""
        digest = hashlib.sha256()
        walked = os.walk(self.folder, followlinks=True)
        paths = sorted(Path(folder, name) for folder, _, names in walked for name in names)
        for path in [path for path in paths if path.suffix in READ and path.is_file()]:
            with path.open("rb") as file:
                own = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(self.folder)}\0{own}\n".encode())
        return digest.hexdigest()[:32]

    def embed(self, texts: Sequence[str], watch: Watch = iter) -> dict[str, np.ndarray]:
        """Vectors of texts by their digests, each `[parts, width]` in float32 and of length 1."""
        missing = [text for text in dict.fromkeys(texts) if digest_of(text) not in self._kept]
        for start in watch(range(0, len(missing), BATCH)):
            batch = missing[start : start + BATCH]
            parts = [self._parts(text) for text in batch]
            rows = self._encode(self._model.encode_document, [text for own in parts for text in own])
            ends = np.cumsum([len(own) for own in parts])[:-1]
            self._kept |= dict(zip(map(digest_of, batch), np.split(rows, ends), strict=True))
        vectors = {digest: self._kept[digest] for digest in map(digest_of, texts)}
        for digest in list(self._kept)[: max(0, len(self._kept) - MOST_KEPT)]:
            del self._kept[digest]
        return vectors

    def embed_question(self, text: str) -> np.ndarray:
        """The vector of a question, `[width]`."""
        vector: np.ndarray = self._encode(self._model.encode_query, [text])[0]
        return vector

    @cached_property
    def width(self) -> int:
        """How many numbers a vector has."""
        return len(self.embed_question(""))

    def _encode(self, encode: Callable[..., Any], texts: list[str]) -> np.ndarray:
        rows = encode(texts, batch_size=BATCH, normalize_embeddings=True, show_progress_bar=False)
        return np.nan_to_num(np.asarray(rows, dtype=np.float32))

    def _parts(self, text: str) -> list[str]:
        """A text, or the pieces of it that the encoder can read."""
        return (text.strip() and self._splitter and self._splitter.chunks(text)) or [text]

    @cached_property
    def _splitter(self) -> Any:
        """What divides a text; None for an encoder that reads any length."""
        from tokenizers import Tokenizer

        most, backend = self._model.get_max_seq_length(), getattr(self._model.tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(most, int) or most <= 2 * SPARE_TOKENS:
            return None
        splitters = import_extra("semantic_text_splitter", extra="rag", wanted_by="splitting documents")
        counting = Tokenizer.from_str(backend.to_str())  # the encoder's own truncates and pads
        counting.no_truncation()
        counting.no_padding()
        return splitters.TextSplitter.from_huggingface_tokenizer(counting, most - SPARE_TOKENS)


class Meaning:
    """The vectors of pieces, and their order for questions."""

    def __init__(
        self, encoder: Encoder, pieces: Sequence[Piece], store: ChunkStore | None = None, watch: Watch = iter
    ) -> None:
        self._encoder, self._pieces, self._watch = encoder, pieces, watch
        folder = beside(store, "vectors") if store is not None else None
        self._folder = folder / encoder.identity if folder is not None else None

    def rank(self, question: str) -> list[int]:
        """The numbers of all pieces, those nearest to what a question means first; of each its best part counts."""
        vectors = [self.vectors[digest_of(piece.text)] for piece in self._pieces]
        starts = np.cumsum([0, *(len(rows) for rows in vectors[:-1])])
        nearness = np.concatenate(vectors) @ self._encoder.embed_question(question)
        order: list[int] = np.argsort(-np.maximum.reduceat(nearness, starts), kind="stable").tolist()
        return order

    @cached_property
    def vectors(self) -> dict[str, np.ndarray]:
        """The vectors of all pieces by the digests of their texts; what is not kept is computed, and then kept."""
        by_name: dict[str, dict[str, str]] = {}
        for piece in self._pieces:
            by_name.setdefault(piece.name, {})[digest_of(piece.text)] = piece.text
        kept = {name: self._read(name) for name in by_name}
        missing = [
            text for name, texts in by_name.items() for digest, text in texts.items() if digest not in kept[name]
        ]
        vectors = self._encoder.embed(missing, self._watch)
        for name, texts in by_name.items():
            if kept[name].keys() != texts.keys():
                own = kept[name]
                kept[name] = {digest: own[digest] if digest in own else vectors[digest] for digest in texts}
                self._write(name, kept[name])
            vectors |= kept[name]
        return vectors

    def _read(self, name: str) -> dict[str, np.ndarray]:
        """What is kept of a document; nothing if it cannot be read or holds something else."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if self._folder is None:
            return {}
        try:
            vectors: dict[str, np.ndarray] = load(vectors_file(self._folder, name).read_bytes())
        except (OSError, ValueError, SafetensorError):  # the file is made again
            return {}
        are_sound = all(
            rows.dtype == np.float32 and rows.ndim == 2 and len(rows) and rows.shape[1] == self._encoder.width
            and (np.linalg.norm(rows, axis=1) <= 1.001).all() for rows in vectors.values()
        )  # fmt: skip
        return vectors if are_sound else {}

    def _write(self, name: str, vectors: dict[str, np.ndarray]) -> None:
        from safetensors.numpy import save

        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a store that cannot be written: computed again next time
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = save({digest: np.ascontiguousarray(rows) for digest, rows in vectors.items()})
            write_atomically(vectors_file(self._folder, name), [content], durable=False)


def digest_of(text: str) -> str:
    """What a text is known by."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _folder(name: str) -> Path:
    """The folder of an encoder."""
    from huggingface_hub import constants, snapshot_download

    folder = os.path.expanduser(name)
    if os.path.isdir(folder):
        return Path(folder)
    try:
        return Path(snapshot_download(name, cache_dir=constants.HF_HUB_CACHE, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the encoder {name!r} is neither a folder here nor in the hub's cache. `hf download {name}` brings it."
            " Or give a folder that sentence-transformers or model2vec saved it in."
        ) from error
