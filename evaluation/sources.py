# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which documents the chunks of a store came from: a small JSON file for each indexed document, beside the chunks.

Chunks are named by their content. These files are for people alone, who list, find and remove documents by name; no
request reads them. They hold names in clear.
"""

import contextlib
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from hf_blend import ChunkStore
from hf_blend.errors import StoreError
from hf_blend.store.format import hash_namespace
from hf_blend.store.tiers.files import write_atomically

from .documents import Document
from .parsing import printable

FORMAT = "hf_blend.source/1"
MAX_BYTES = 64 << 20  # of an entry: a million chunks
DIGEST = re.compile("[0-9a-f]{64}")
FAULTS = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)  # of an entry


@dataclass(frozen=True)
class Source:
    """An indexed document."""

    name: str
    path: str
    model: str
    fingerprint: str
    chunk_tokens: int
    created: float
    digests: tuple[str, ...]

    @property
    def id(self) -> str:
        """What tells it from all others: indexing a document again replaces its entry."""
        text = "\0".join((self.fingerprint, self.path, self.name))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build it from what `json` read."""
        source = cls(**{**values, "digests": tuple(values["digests"])})
        texts = (source.name, source.path, source.model, source.fingerprint, *source.digests)
        are_typed = all(isinstance(text, str) for text in texts) and type(source.chunk_tokens) is int
        if not (are_typed and source.chunk_tokens > 0 and math.isfinite(source.created)):
            raise StoreError(f"no document can have {values}. Index it again.")
        if not all(map(DIGEST.fullmatch, source.digests)):
            raise StoreError(f"the digests of {source.name!r} are none. Index it again.")
        return replace(source, name=printable(source.name), model=printable(source.model))


class Sources:
    """The documents of one namespace of a store."""

    def __init__(self, store: ChunkStore) -> None:
        self._folder, self._vectors = beside(store, "sources"), beside(store, "vectors")

    def add(self, sources: Iterable[Source]) -> None:
        """Write documents down, replacing what was known of the same ones."""
        if self._folder is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for source in sources:
            content = json.dumps({"format": FORMAT, **asdict(source)}).encode("ascii")
            write_atomically(self._folder / f"{source.id}.json", [content], durable=False)

    def __iter__(self) -> Iterator[Source]:
        """All documents, by name; a file that cannot be read, or holds something else, is passed over."""
        yield from sorted(self._read().values(), key=lambda source: (source.name, source.model))

    def _read(self) -> dict[Path, Source]:
        sources = {}
        for path in self._folder.glob("*.json") if self._folder else ():
            with contextlib.suppress(*FAULTS):
                if path.is_file() and path.stat().st_size <= MAX_BYTES:
                    values = json.loads(path.read_text("utf-8"))
                    if values.pop("format", None) == FORMAT:
                        sources[path] = Source.from_dict(values)
        return sources

    def named(self, name: str) -> list[Source]:
        """The documents of a name, of a path, or in a folder of that name, however its accents are encoded."""
        plain = _composed(name.rstrip("/"))
        return [
            source
            for source in self
            if plain in (_composed(source.name), _composed(source.path))
            or _composed(source.name).startswith(f"{plain}/")
        ]

    def chunk_tokens(self, documents: Iterable[Document], model: str) -> dict[str, int]:
        """The sizes that documents were split at when they were indexed."""
        sizes: dict[str, int] = {}
        for source in sorted(self, key=lambda source: (source.model == model, source.created)):
            sizes |= {source.name: source.chunk_tokens} | ({source.path: source.chunk_tokens} if source.path else {})
        paths = (
            (document.name, str(document.path.resolve()) if document.path else document.name) for document in documents
        )
        by_name = {name: sizes.get(path, sizes.get(name)) for name, path in paths}
        return {name: size for name, size in by_name.items() if size is not None}

    def remove(self, sources: Iterable[Source]) -> list[str]:
        """Strike documents out."""
        gone = list(sources)
        for path in [path for path, source in self._read().items() if source in gone]:
            path.unlink(missing_ok=True)
        for folder in self._vectors.glob("*") if self._vectors else ():
            for source in gone:
                vectors_file(folder, source.name).unlink(missing_ok=True)
        kept = {digest for source in self for digest in source.digests}
        return [digest for digest in dict.fromkeys(d for source in gone for d in source.digests) if digest not in kept]


def beside(store: ChunkStore, kind: str) -> Path | None:
    """The folder beside the chunks of a namespace for what is kept of their documents; None where nothing is kept.

    Nothing is kept of a store that has no folder on this machine.
    """
    root = next((Path(tier.root) for tier in store.tiers() if hasattr(tier, "root") and tier.is_local), None)
    return root / kind / hash_namespace(store.namespace)[:16] if root else None


def vectors_file(folder: Path, name: str) -> Path:
    """The file with the vectors of a document, in the folder of an encoder."""
    return folder / f"{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}.safetensors"


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
