# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which documents the chunks of a store came from: a small JSON file for each indexed document, beside the chunks.

Chunks are named by their content. These files are for people alone, who list, find and remove documents by name; no
request reads them. They hold names in clear.
"""

import contextlib
import hashlib
import json
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

from .documents import Document, printable

FORMAT = "hf_blend.source/1"
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
        """Build it from what `json` read, which others may have written."""
        source = cls(**{**values, "digests": tuple(values["digests"])})
        texts = (source.name, source.path, source.model, source.fingerprint)
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or type(source.chunk_tokens) is not int or source.chunk_tokens < 1:
            raise StoreError(f"no document can have {values}. Index it again.")
        if not all(DIGEST.fullmatch(digest) for digest in source.digests):
            raise StoreError(f"the digests of {source.name!r} are none. Index it again.")
        return replace(
            source,
            name=printable(source.name),
            model=printable(source.model),
            created=float(source.created),
        )


class Sources:
    """The documents of one namespace of a store."""

    def __init__(self, store: ChunkStore) -> None:
        self._folder = _folder(store)

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

    def named(self, name: str) -> list[Source]:
        """The documents of a name, of a path, or in a folder of that name, however its accents are encoded."""
        plain = _composed(name.rstrip("/"))
        found = []
        for source in self:
            source_name = _composed(source.name)
            if plain in (source_name, _composed(source.path)) or source_name.startswith(f"{plain}/"):
                found.append(source)
        return found

    def chunk_tokens(self, documents: Iterable[Document]) -> dict[str, int]:
        """The sizes that documents were last split at when they were indexed, by name."""
        sizes: dict[str, int] = {}
        for source in sorted(self, key=lambda source: source.created):
            sizes[source.name] = source.chunk_tokens
            sizes[source.path] = source.chunk_tokens
        by_name = {}
        for document in documents:
            path = str(document.path.resolve()) if document.path else document.name
            size = sizes.get(path, sizes.get(document.name))
            if size is not None:
                by_name[document.name] = size
        return by_name

    def remove(self, sources: Iterable[Source]) -> list[str]:
        """Strike documents out; gives the digests of the chunks that no other document has."""
        removed = list(sources)
        for path, source in self._read().items():
            if source in removed:
                path.unlink(missing_ok=True)
        kept = {digest for source in self for digest in source.digests}
        digests = dict.fromkeys(digest for source in removed for digest in source.digests)
        return [digest for digest in digests if digest not in kept]

    def _read(self) -> dict[Path, Source]:
        sources: dict[Path, Source] = {}
        if self._folder is None:
            return sources
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(*FAULTS):
                values = json.loads(path.read_text("utf-8"))
                if values.pop("format", None) == FORMAT:
                    sources[path] = Source.from_dict(values)
        return sources


def _folder(store: ChunkStore) -> Path | None:
    """The folder beside the chunks of a namespace; None for a store without a folder here."""
    for tier in store.tiers():
        if hasattr(tier, "root") and tier.is_local:
            return Path(tier.root) / "sources" / hash_namespace(store.namespace)[:16]
    return None


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
