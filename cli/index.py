# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Compute and store the chunks of a corpus ahead of time."""

import os
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .output import Json, SecretFile, fail, progress, read_secret, show

__all__ = ["index"]

PATIENCE_S = 60.0  # nobody waits for an answer here

Names = Annotated[list[str] | None, typer.Argument(metavar="CORPUS ...", help="Text files, JSONL files, or folders.")]
Model = Annotated[str | None, typer.Option(help="Hub id or path; the default is the bundled reference model.")]
Store = Annotated[str | None, typer.Option("--store", help="Folder of the chunk store; the default is the library's.")]
Remote = Annotated[str | None, typer.Option(help="URL of a tier behind it: s3://…, hf://…, redis://…, file://….")]
Namespace = Annotated[str, typer.Option(help="Store the chunks in this namespace.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Documents are cut into chunks of this many tokens.")]
ShardOption = Annotated[
    str | None, typer.Option("--shard", help="NUMBER/COUNT: only this share; accelerate launch and torchrun say it.")
]
Device = Annotated[str | None, typer.Option(help="Where the model runs; the default is a GPU of its own, or the CPU.")]


def index(
    corpus: Names = None,
    model: Model = None,
    store: Store = None,
    remote: Remote = None,
    namespace: Namespace = "",
    secret_file: SecretFile = None,
    chunk_tokens: ChunkTokens = 512,
    shard: ShardOption = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """Store every chunk of a corpus that is not stored yet; without a corpus, of the bundled documents.

    Stopped at any time and run again, it goes on where it was. Several processes share the work by the digests of the
    chunks, and never talk: accelerate launch --multi_gpu --num_processes 2 -m hf_blend.cli.main index CORPUS. The
    bytes of the store are those of one process, where a process computes with as many threads. Exit code 1 if the
    store did not keep all of it.

    Examples:
        hf-blend index --store my-chunks
        hf-blend index --store my-chunks --shard 0/2 --json
        hf-blend index documents/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    from hf_blend import ChunkStore
    from hf_blend.evaluation import indexing
    from hf_blend.evaluation.bundled import load_model

    share, documents = indexing.Shard.find(shard), indexing.Corpus(corpus or [])
    loaded, tokenizer = load_model(model)
    loaded.to(device or _own_device())
    is_first = share.number == 0
    shown = progress(documents, "documents", total=len(documents), quiet=json or not is_first)
    place: dict[str, Any] = {"remote": remote, "remote_deadline_s": PATIENCE_S, "namespace": namespace}
    with ChunkStore.open(store, memory_bytes=0, **place, secret=read_secret(secret_file)) as opened:
        done = indexing.index(loaded, tokenizer, opened, shown, chunk_tokens, share)
        evicted = sum(opened.stats()["evicted"].values())
    if is_first or shard:
        show({**asdict(done), "evicted": evicted, "shard": f"{share.number}/{share.count}"}, as_json=json)
    if done.refused or evicted:
        fail(f"the store did not keep {done.refused + evicted} chunks. Make room for them, and run it again.")


def _own_device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
