# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Look into a chunk store."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_blend.errors import StoreError

from .output import Json, say, show

if TYPE_CHECKING:
    from hf_blend.store import ChunkStore

__all__ = ["ls", "stats"]

Store = Annotated[str | None, typer.Option("--store", help="Folder of the store; the default is that of the library.")]
Namespace = Annotated[str, typer.Option(help="Look at the chunks of this namespace.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Show the newest N only.")]


def ls(store: Store = None, namespace: Namespace = "", limit: Limit = None, json: Json = False) -> None:
    """List the stored chunks, the newest first.

    Examples:
        hf-blend store ls
        hf-blend store ls --limit 5 --json
    """
    with _opened(store, namespace) as opened:
        entries = sorted(opened.entries(), key=lambda entry: entry.created, reverse=True)[:limit]
    if not entries and not json:
        say("The store holds no chunks.")
        return
    show([asdict(entry) for entry in entries], as_json=json)


def stats(store: Store = None, namespace: Namespace = "", json: Json = False) -> None:
    """Say how much is stored, and for how many models.

    Examples:
        hf-blend store stats
        hf-blend store stats --json
    """
    with _opened(store, namespace) as opened:
        entries = list(opened.entries())
    tiers = Counter(entry.tier for entry in entries)
    show(
        {
            "chunks": len(entries),
            "tokens": sum(entry.tokens for entry in entries),
            "nbytes": sum(entry.nbytes for entry in entries),
            "models": len({entry.fingerprint for entry in entries}),
            **{f"chunks_in_{tier}": count for tier, count in sorted(tiers.items())},
        },
        as_json=json,
    )


def _opened(location: str | None, namespace: str) -> "ChunkStore":
    from hf_blend.store import ChunkStore

    if location is not None and "://" not in location and not Path(location).expanduser().is_dir():
        raise StoreError(
            f"there is no store at {location!r}: no such folder. Give the folder that ChunkStore.open was given, or "
            "leave --store out for the default one."
        )
    return ChunkStore.open(location, memory_bytes=0, namespace=namespace)
