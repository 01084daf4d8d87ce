# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Look into a chunk store, check it, and keep it small."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_blend.errors import ConfigError, HfBlendError, StoreError

from .options import REAL, Store
from .output import Json, fail, say, show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_blend.store import ChunkStore
    from hf_blend.store.store import EntryInfo

__all__ = ["check", "gc", "ls", "rm", "stats"]

Namespace = Annotated[str, typer.Option(help="Look at the chunks of this namespace.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Show the newest N only.")]
Repair = Annotated[bool, typer.Option("--repair", help="Remove damaged entries.")]
ToBytes = Annotated[int | None, typer.Option(min=0, help="Evict until this is left, in all namespaces.")]
Digests = Annotated[list[str] | None, typer.Argument(metavar="DIGEST", help="Digests, or how they begin.")]
Model = Annotated[str | None, typer.Option(help="All chunks of the models whose fingerprint begins so.")]
Tokenizer = Annotated[str, typer.Option("--model", help="The model of the chunks: its tokenizer shows first words.")]
FIRST_TOKENS = 12
All = Annotated[bool, typer.Option("--all", help="All chunks of the namespace.")]


def check(store: Store = None, namespace: Namespace = "", repair: Repair = False, json: Json = False) -> None:
    """Read and verify every entry. Exit code 1 if one is damaged and stays.

    Entries of another namespace are counted as foreign: nothing can be known of them, and they stay.

    Examples:
        hf-blend store check
        hf-blend store check --repair --json
    """
    with _open(store, namespace) as opened:
        results = list(opened.check(repair=repair))
    whole, foreign, damaged = [], [], []
    for result in results:
        if not result.reason:
            whole.append(result)
        elif result.reason in ("namespace", "kind"):
            foreign.append(result)
        else:
            damaged.append(result)
    figures = {
        "whole": len(whole),
        "nbytes": sum(result.nbytes for result in whole),
        "damaged": len(damaged),
        "removed": sum(result.removed for result in damaged),
        "foreign": len(foreign),
        "reasons": dict(Counter(result.reason for result in damaged)),
    }
    show(figures, as_json=json)
    left = [result for result in damaged if not result.removed]
    if left:
        names = ", ".join(f"{result.digest} ({result.reason})" for result in left[:5])
        fail(f"{len(left)} of {len(results)} entries cannot be used: {names}. Run hf-blend store check --repair.")


def gc(store: Store = None, namespace: Namespace = "", to_bytes: ToBytes = None, json: Json = False) -> None:
    """Remove what was left by a crash, or is first to be evicted.

    Examples:
        hf-blend store gc
        hf-blend store gc --to-bytes 1000000000 --json
    """
    with _open(store, namespace) as opened:
        orphans = opened.stats()["removed"].get("orphans", 0)  # opening removes them
        collected = opened.collect(to_bytes)
    show({**collected, "orphans": collected["orphans"] + orphans}, as_json=json)


def rm(
    digests: Digests = None,
    everything: All = False,
    model: Model = None,
    store: Store = None,
    namespace: Namespace = "",
    json: Json = False,
) -> None:
    """Remove chunks: by their digests, of a model, or all.

    Examples:
        hf-blend store rm --model 0123abcd
        hf-blend store rm --all --json
    """
    if not (digests or everything or model):
        raise ConfigError(
            "0 chunks were named, expected one or more. Give digests, --model or --all; hf-blend store ls shows what "
            "there is."
        )
    with _open(store, namespace) as opened:
        chosen = []
        entries = list(opened.entries())
        for entry in entries:
            if everything or (model and entry.fingerprint.startswith(model)):
                chosen.append(entry.digest)
        for beginning in digests or ():
            matching = [entry.digest for entry in entries if entry.digest.startswith(beginning)]
            if len(matching) != 1:
                raise StoreError(
                    f"{len(matching)} stored chunks have a digest that begins with {beginning!r}, expected one. "
                    "hf-blend store ls shows the digests."
                )
            chosen += matching
        show({"removed": opened.remove(dict.fromkeys(chosen))}, as_json=json)


def ls(
    store: Store = None, namespace: Namespace = "", limit: Limit = None, model: Tokenizer = REAL, json: Json = False
) -> None:
    """List every chunk, the newest first, with its first words.

    Examples:
        hf-blend store ls
        hf-blend store ls --limit 5 --json
    """
    with _open(store, namespace) as opened:
        entries = sorted(opened.entries(), key=lambda entry: entry.created, reverse=True)[:limit]
        words = _first_words(opened, entries, model)
    if not entries and not json:
        say("The store holds no chunks.")
        return
    rows = [{"begins": words.get(entry.digest), **asdict(entry)} for entry in entries]
    show(rows, as_json=json, header=True)


def _first_words(opened: "ChunkStore", entries: "Sequence[EntryInfo]", model: str) -> dict[str, str]:
    """The first words of the chunks that a model's tokenizer made, by digest; none where there is no such model."""
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.prompt.pieces import tokenizer_digest

    if not entries:
        return {}
    try:
        tokenizer = open_model(model).tokenizer
    except HfBlendError as error:
        say(f"First words are left out: {error}")
        return {}
    made_by: dict[str, str] = {}  # digest of a tokenizer, by model
    words = {}
    for entry in entries:
        listed = opened.index.get(entry.digest)
        if listed is None:
            continue
        if not made_by.get(entry.fingerprint):
            chunk = opened.get(listed.key)
            made_by[entry.fingerprint] = "" if chunk is None else chunk.tokenizer
        if made_by[entry.fingerprint] == tokenizer_digest(tokenizer):
            words[entry.digest] = " ".join(tokenizer.decode(listed.key.token_ids[:FIRST_TOKENS]).split())
    return words


def stats(store: Store = None, namespace: Namespace = "", json: Json = False) -> None:
    """Say how much is stored, and for how many models.

    Examples:
        hf-blend store stats
        hf-blend store stats --json
    """
    with _open(store, namespace) as opened:
        entries = list(opened.entries())
        counters = opened.stats()
        folder = next((str(tier.root) for tier in opened.tiers if hasattr(tier, "root")), None)
    figures = {
        "folder": folder,
        "chunks": len(entries),
        "tokens": sum(entry.tokens for entry in entries),
        "nbytes": sum(entry.nbytes for entry in entries),
        "models": len({entry.fingerprint for entry in entries}),
    }
    for tier, count in sorted(Counter(entry.tier for entry in entries).items()):
        figures[f"chunks_in_{tier}"] = count
    figures["disk_bytes"] = counters["bytes"].get("disk", 0)
    figures["disk_capacity_bytes"] = counters["capacity_bytes"].get("disk")
    show(figures, as_json=json)


def _open(location: str | None, namespace: str) -> "ChunkStore":
    """Open a store; a folder that is not there is refused, not made."""
    from hf_blend.store import ChunkStore

    if location is not None and "://" not in location and not Path(location).expanduser().is_dir():
        raise StoreError(
            f"there is no store at {location!r}: no such folder. Give the folder that ChunkStore.open was given, or "
            "leave --store out for the default one."
        )
    return ChunkStore.open(location, memory_bytes=0, namespace=namespace)
