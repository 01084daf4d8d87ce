# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Look into a chunk store, check it, and keep it small."""

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.errors import ConfigError, StoreError

from .options import Store
from .output import Json, fail, say, show

if TYPE_CHECKING:
    from hf_blend.evaluation.sources import Source
    from hf_blend.store import ChunkStore, EntryInfo

__all__ = ["check", "gc", "ls", "pin", "rm", "stats"]

Namespace = Annotated[str, typer.Option(help="Look at the chunks of this namespace.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Show the newest N only.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME", help="Documents or folders as ls names them, or digests.")
]
Chunks = Annotated[bool, typer.Option("--chunks", help="Show every chunk, with its digest.")]
Digests = Annotated[list[str] | None, typer.Argument(metavar="DIGEST", help="Digests, or how they begin.")]
Model = Annotated[str | None, typer.Option(help="All chunks of the models whose fingerprint begins so.")]
All = Annotated[bool, typer.Option("--all", help="All chunks of the namespace.")]


def check(
    store: Store = None,
    namespace: Namespace = "",
    repair: Annotated[bool, typer.Option("--repair", help="Remove what can never become good.")] = False,
    json: Json = False,
) -> None:
    """Read and verify every entry. Exit code 1 if one is damaged and stays.

    Entries of another namespace are counted as foreign: nothing can be known of them, and they stay.

    Examples:
        hf-blend store check
        hf-blend store check --repair --json
    """
    with _opened(store, namespace) as opened:
        results = list(opened.check(repair=repair))
    foreign = [result for result in results if result.reason == "namespace"]
    bad = [result for result in results if result.reason and result not in foreign]
    whole = [result for result in results if not result.reason]
    document = {
        "whole": len(whole), "nbytes": sum(result.nbytes for result in whole), "damaged": len(bad),
        "removed": sum(result.removed for result in bad), "foreign": len(foreign),
        "reasons": dict(Counter(result.reason for result in bad)),
    }  # fmt: skip
    show(document, as_json=json)
    left = [result for result in bad if not result.removed]
    if left:
        names = ", ".join(f"{result.digest} ({result.reason})" for result in left[:5])
        fail(f"{len(left)} of {len(results)} entries cannot be used: {names}. Run hf-blend store check --repair.")


def gc(
    store: Store = None,
    namespace: Namespace = "",
    to_bytes: Annotated[int | None, typer.Option(min=0, help="Evict until this is left, in all namespaces.")] = None,
    ttl_s: Annotated[float | None, typer.Option(min=0, help="Remove chunks older than this, in seconds.")] = None,
    json: Json = False,
) -> None:
    """Remove what is too old, left by a crash, or first to be evicted.

    Examples:
        hf-blend store gc --ttl-s 2592000
        hf-blend store gc --to-bytes 1000000000 --json
    """
    with _opened(store, namespace, ttl_s=ttl_s) as opened:
        orphans = opened.stats()["removed"].get("orphans", 0)  # opening removes them
        collected = opened.collect(to_bytes)
    show({**collected, "orphans": collected["orphans"] + orphans}, as_json=json)


def rm(
    names: Names = None,
    everything: All = False,
    model: Model = None,
    store: Store = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Remove documents, or chunks by their digests. A chunk that another document has too stays.

    Examples:
        hf-blend store rm --model 0123abcd
        hf-blend store rm --all --json
    """
    from hf_blend.evaluation.sources import Sources

    with _opened(store, namespace) as opened:
        sources = Sources(opened)
        documents = [source for name in names or [] for source in sources.named(name)]
        digests = [name for name in names or [] if not sources.named(name)]
        if digests or everything or model or not documents:
            chosen = _chosen(opened, digests, everything, model)
            documents += [
                source for source in sources if everything or (model and source.fingerprint.startswith(model))
            ]
        else:
            chosen = []
        chosen += sources.remove(documents)
        show({"removed": opened.remove(dict.fromkeys(chosen)), "documents": len(documents)}, as_json=json)


def pin(
    digests: Digests = None,
    everything: All = False,
    model: Model = None,
    off: Annotated[bool, typer.Option("--off", help="Let them be evicted again.")] = False,
    store: Store = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Keep chunks from being evicted; they still count against the caps.

    Examples:
        hf-blend store pin --all
        hf-blend store pin --all --off --json
    """
    with _opened(store, namespace) as opened:
        chosen = _chosen(opened, digests, everything, model)
        opened.set_pins(chosen, not off)
    show({"unpinned" if off else "pinned": len(chosen)}, as_json=json)


def ls(
    store: Store = None,
    namespace: Namespace = "",
    limit: Limit = None,
    chunks: Chunks = False,
    json: Json = False,
) -> None:
    """List the indexed documents with their models, sizes and ages. With --chunks every chunk, the newest first.

    Chunks that no document is known of are in one row without a name: those of texts that were given to the library,
    and the beginnings of prompts.

    Examples:
        hf-blend store ls
        hf-blend store ls --chunks --limit 5 --json
    """
    from hf_blend.evaluation.sources import Sources

    with _opened(store, namespace) as opened:
        entries = sorted(opened.entries(), key=lambda entry: entry.created, reverse=True)
        sources = list(Sources(opened))
    if not entries and not json:
        say("The store holds no chunks.")
        return
    names = {digest: source.name for source in sources for digest in source.digests}
    models = {source.fingerprint: source.model for source in sources}
    labels = [{"name": names.get(entry.digest), "model": models.get(entry.fingerprint)} for entry in entries]
    by_chunk = [{**asdict(entry), **label} for entry, label in zip(entries, labels, strict=True)]
    show((by_chunk if chunks else _document_rows(entries, sources))[:limit], as_json=json, header=True)


def _document_rows(entries: "list[EntryInfo]", sources: "list[Source]") -> list[dict[str, Any]]:
    """A row for each document, the newest first, and one for each model's chunks of no document."""
    by_digest = {entry.digest: entry for entry in entries}
    rows = []
    for source in sorted(sources, key=lambda source: -source.created):
        stored = [by_digest[digest] for digest in source.digests if digest in by_digest]
        missing = len(source.digests) - len(stored)
        rows.append(_document_row(source.name, source.model, source.fingerprint, stored, missing))
    models = {source.fingerprint: source.model for source in reversed(sources)}
    in_sources = {digest for source in sources for digest in source.digests}
    rest = [entry for entry in entries if entry.digest not in in_sources]
    for fingerprint in dict.fromkeys(entry.fingerprint for entry in rest):
        own = [entry for entry in rest if entry.fingerprint == fingerprint]
        rows.append(_document_row(None, models.get(fingerprint), fingerprint, own, 0))
    return rows


def _document_row(
    name: str | None, model: str | None, fingerprint: str, entries: "list[EntryInfo]", missing: int
) -> dict[str, Any]:
    newest = max((entry.created for entry in entries), default=None)
    return {
        "name": name, "model": model, "chunks": len(entries), "tokens": sum(entry.tokens for entry in entries),
        "nbytes": sum(entry.nbytes for entry in entries),
        "age_s": None if newest is None else round(time.time() - newest), "missing_chunks": missing,
        "fingerprint": fingerprint,
    }  # fmt: skip


def stats(store: Store = None, namespace: Namespace = "", json: Json = False) -> None:
    """Say how much is stored, and for how many models.

    Examples:
        hf-blend store stats
        hf-blend store stats --json
    """
    with _opened(store, namespace) as opened:
        entries, now = list(opened.entries()), opened.stats()
    tiers = Counter(entry.tier for entry in entries)
    show(
        {
            "chunks": len(entries), "tokens": sum(entry.tokens for entry in entries),
            "nbytes": sum(entry.nbytes for entry in entries), "models": len({entry.fingerprint for entry in entries}),
            **{f"chunks_in_{tier}": count for tier, count in sorted(tiers.items())},
            "pinned": sum(entry.pinned for entry in entries),
            "disk_bytes": now["bytes"].get("disk", 0), "disk_capacity_bytes": now["capacity_bytes"].get("disk"),
        },
        as_json=json,
    )  # fmt: skip


def _opened(
    location: str | None, namespace: str, ttl_s: float | None = None
) -> "ChunkStore":
    """Open a store; a folder that is not there is refused, not made."""
    from hf_blend.store import ChunkStore

    if location is not None and "://" not in location and not Path(location).expanduser().is_dir():
        raise StoreError(
            f"there is no store at {location!r}: no such folder. Give the folder that ChunkStore.open was given, or "
            "leave --store out for the default one."
        )
    return ChunkStore.open(location, memory_bytes=0, namespace=namespace, ttl_s=ttl_s)


def _chosen(store: "ChunkStore", digests: list[str] | None, everything: bool, model: str | None) -> list[str]:
    """Full digests of the chunks that were named in one of the three ways."""
    if not (digests or everything or model):
        raise ConfigError(
            f"{len(digests or [])} chunks were named, expected one or more. Give names of documents, digests, --model "
            "or --all; hf-blend store ls shows what there is."
        )
    entries = list(store.entries())
    if not digests:
        return [entry.digest for entry in entries if everything or entry.fingerprint.startswith(model or "")]
    chosen = []
    for beginning in digests:
        names = [entry.digest for entry in entries if entry.digest.startswith(beginning)]
        if len(names) != 1:
            raise StoreError(
                f"{len(names)} stored documents or chunks are called {beginning!r}, expected one. hf-blend store ls "
                "shows the documents, with --chunks also the digests."
            )
        chosen += names
    return chosen
