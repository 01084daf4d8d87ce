# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the KV of documents ahead of time."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .choosing import say_recipe
from .output import Json, duration, fail, humanise, interruptible, progress, say, show
from .reading import load, read, split

if TYPE_CHECKING:
    from hf_blend.evaluation.indexing import Indexer

__all__ = ["index"]


Remote = Annotated[str | None, typer.Option(help="URL of a tier behind it: s3://…, hf://…, file://….")]
Namespace = Annotated[str, typer.Option(help="Store the chunks in this namespace.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and store nothing.")]


def index(
    corpus: options.Corpus = None,
    model: options.Model = options.REAL,
    store: options.Store = None,
    remote: Remote = None,
    namespace: Namespace = "",
    chunk_tokens: options.ChunkTokens = 512,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Store every chunk of a corpus that is not stored yet; without a corpus, of the bundled handbook.

    It says first how many tokens there are, how many bytes their KV takes and how long that lasts, and what it leaves
    out. Stopped at any time and run again, it continues where it was. Any number of processes may write to one store.
    Exit code 1 if it did not keep all of it.

    Examples:
        hf-blend index --store my-chunks
        hf-blend index --store my-chunks --dry-run --json
        hf-blend index documents/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.evaluation.indexing import Indexer

    documents = read(corpus or [])
    source = open_model(model, device, dtype)
    pieces = split(documents, source, chunk_tokens)
    names = {piece.name for piece in pieces}
    location = "memory://" if dry_run else store
    with ChunkStore.open(location, memory_bytes=0, remote=remote, namespace=namespace) as opened:
        # Say what it takes
        indexer = Indexer(load(source, opened, blends=False), source.tokenizer, opened, pieces)
        done = indexer.done
        size = f"{done.tokens:,} tokens, {humanise('nbytes', indexer.nbytes)} of KV"
        say(f"{len(names):,} documents in {done.chunks:,} chunks: {size}.")
        indexer.check_room()
        if indexer.missing:
            seconds = duration(indexer.estimated_s())
            say(f"{len(indexer.missing):,} to compute, about {seconds} on {source.device}.")
        if dry_run:
            if json:
                estimate = {"pieces": done.chunks, "tokens": done.tokens, "nbytes": indexer.nbytes}
                show({**estimate, "left_out": documents.rows()}, as_json=True)
            return

        # Compute and store
        with interruptible(lambda: _stopped(indexer)):
            indexer.run(lambda keys: progress(keys, "chunks"))
        say_recipe(opened.recipe(indexer.model))
        evicted = sum(opened.stats()["evicted"].values())

    if json:
        figures = {"documents": len(names), **asdict(done), "evicted": evicted, "left_out": documents.rows()}
        show(figures, as_json=True)
    else:
        typer.echo(f"{done.stored:,} chunks were computed and stored, {done.present:,} were there before.")
    if done.refused or evicted:
        fail(f"the store did not keep {done.refused + evicted} chunks. Make room for them, and run it again.")


def _stopped(indexer: "Indexer") -> str:
    done = indexer.done
    missing = len(indexer.missing) - done.stored - done.refused
    return (
        f"{done.stored + done.present:,} chunks are stored and stay, {missing:,} are missing. Run the same command "
        "again to continue."
    )
