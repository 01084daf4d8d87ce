# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the KV of documents ahead of time."""

import contextlib
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.evaluation.parsing import FileLimits

from . import options
from .calibrating import Calibrate, calibrate_once, say_recipe
from .choosing import meaning_of, open_encoder, open_source
from .output import Cost, Json, duration, fail, humanise, interruptible, progress, say, show
from .reading import choose_files, load, read, split

if TYPE_CHECKING:
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.indexing import Indexed, Indexer

__all__ = ["index"]

PATIENCE_S = 60.0  # nobody waits for an answer here

Remote = Annotated[str | None, typer.Option(help="URL of a tier behind it: s3://…, hf://…, redis://…, file://….")]
Namespace = Annotated[str, typer.Option(help="Store the chunks in this namespace.")]
ShardOption = Annotated[
    str | None, typer.Option("--shard", help="NUMBER/COUNT: only this share; accelerate launch and torchrun say it.")
]
Ray = Annotated[int | None, typer.Option("--ray", min=1, help="Compute in so many actors of Ray, each with a model.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it takes, and store nothing.")]


def index(
    corpus: options.Corpus = None,
    model: options.Model = None,
    store: options.Store = None,
    remote: Remote = None,
    namespace: Namespace = "",
    meaning: options.Meaning = None,
    chunk_tokens: options.ChunkTokens = 512,
    shard: ShardOption = None,
    ray: Ray = None,
    calibrate: Calibrate = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    include: options.Include = None,
    exclude: options.Exclude = None,
    file_megabytes: options.FileMegabytes = options.MEGABYTES,
    file_seconds: options.FileSeconds = options.SECONDS,
    dry_run: DryRun = False,
    verbose: options.Verbose = False,
    json: Json = False,
) -> None:
    """Store every chunk of a corpus that is not stored yet; without a corpus, of the bundled handbook.

    It says first how many tokens there are, how many bytes their KV takes and how long that lasts, and what it leaves
    out. Stopped at any time and run again, it continues where it was. Several processes share the work by the digests
    of the chunks, and never talk: accelerate launch --multi_gpu --num_processes 2 -m hf_blend.cli.main index CORPUS.
    With --ray, actors of the Ray cluster that RAY_ADDRESS names, or of this machine, compute: they must see the store.
    The bytes of the store are those of one process, where a process computes with as many threads. Exit code 1 if the
    store did not keep all of it.

    Examples:
        hf-blend index --store my-chunks
        hf-blend index --store my-chunks --shard 0/2 --json
        hf-blend index documents/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.errors import ConfigError, import_extra
    from hf_blend.evaluation import indexing

    share = indexing.Shard.find(shard)
    if ray:
        import_extra("ray.data", extra="ray", wanted_by="hf-blend index --ray")
        if share.count > 1:
            raise ConfigError(
                f"--ray came with the shard {share.number}/{share.count}. Leave it out: Ray shares all out."
            )
    encoder = open_encoder(meaning, device)
    documents = read(corpus or [], FileLimits(file_megabytes, file_seconds), choose_files(include, exclude), verbose)
    source = open_source(model, device, dtype, verbose)
    pieces = split(documents, source, chunk_tokens)
    model = load(source, blends=False)
    estimate = indexing.Estimate.of(pieces, model)
    is_first = share.number == 0
    if is_first:
        size = f"{estimate.tokens:,} tokens, {humanise('nbytes', estimate.nbytes)} of KV"
        say(f"{len({piece.name for piece in pieces}):,} documents in {estimate.pieces:,} chunks: {size}.")
    place: dict[str, Any] = {
        "location": "memory://" if dry_run else store, "memory_bytes": 0, "remote": remote,
        "remote_deadline_s": PATIENCE_S, "namespace": namespace,
    }  # fmt: skip
    with ChunkStore.open(**place) as opened:
        indexing.check_room(opened, estimate)
        indexer = indexing.Indexer(model, source.tokenizer, opened, pieces, share)
        if is_first and indexer.missing:
            say(f"{len(indexer.missing):,} to compute, about {duration(indexer.probe_s())} on {source.device}.")
        if dry_run:
            if json:
                show(asdict(estimate) | {"left_out": documents.left_out}, as_json=True)
            return
        if is_first:
            indexer.name_sources(documents.listed, source.name, chunk_tokens)
            if ranking := meaning_of(encoder, pieces, opened, quiet=json):
                say(f"{len(ranking.vectors):,} texts have vectors for retrieval by meaning.")
        with interruptible(lambda: _kept(indexer.done, len(indexer.missing))):
            if ray:
                done = _run_on_ray(indexer, ray, source, place)
            else:
                cost = Cost(lambda key: len(key.token_ids), estimate.nbytes // max(1, estimate.tokens))
                done = indexer.run(lambda keys: progress(keys, "chunks", cost=cost, quiet=not is_first))
        if is_first:
            if calibrate:
                calibrate_once(indexer.model, source.tokenizer, opened)
            say_recipe(opened.recipe(indexer.model))
        evicted = sum(opened.stats()["evicted"].values())
    own = f"{share.number}/{share.count}"
    if json and (is_first or shard):
        numbers = {"documents": len({piece.name for piece in pieces}), **asdict(done), "evicted": evicted}
        show({**numbers, "left_out": documents.left_out, "shard": own}, as_json=True)
    elif is_first or shard:
        whose = f" of the share {own}" if share.count > 1 else ""
        typer.echo(f"{done.stored:,} chunks{whose} were computed and stored, {done.present:,} were there before.")
    if done.refused or evicted:
        fail(f"the store did not keep {done.refused + evicted} chunks. Make room for them, and run it again.")


def _run_on_ray(indexer: "Indexer", actors: int, source: "ModelSource", settings: dict[str, Any]) -> "Indexed":
    """Let actors of Ray compute what is missing, wherever they run; what Ray prints goes to stderr."""
    import ray.data

    from hf_blend.evaluation.bundled import load_model
    from hf_blend.integrations.ray import index_ray_dataset

    place = {"location": os.path.abspath(settings["location"])} if settings["location"] else {}
    folder = os.path.abspath(source.folder) if os.path.isdir(source.folder) else source.folder
    resources: dict[str, Any] = {"num_gpus": 1} if source.device.type == "cuda" else {}
    load = partial(load_model, folder, source.device.type, str(source.dtype).removeprefix("torch."))
    with contextlib.redirect_stdout(sys.stderr):
        rows = ray.data.from_items([{"text": text} for text in indexer.texts()])
        index_ray_dataset(rows, load, {**settings, **place}, actors=actors, **resources)
    indexer.done.stored = sum(map(indexer.store.contains, indexer.missing))
    return indexer.done


def _kept(done: "Indexed", missing: int) -> str:
    return (
        f"{done.stored + done.present:,} chunks are stored and stay, {missing - done.stored - done.refused:,} are "
        "missing. Run the same command again to continue."
    )
