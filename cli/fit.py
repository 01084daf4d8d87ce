# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Fit a correction: stored chunks are then nearer to full prefill."""

from pathlib import Path
from typing import Annotated

import typer

from hf_blend.evaluation.parsing import FileLimits

from .options import (
    MEGABYTES,
    SECONDS,
    ChunkTokens,
    Corpus,
    Device,
    Dtype,
    FileMegabytes,
    FileSeconds,
    Model,
    Verbose,
)
from .output import Json, duration, fail, progress, say, show
from .reading import read, split

__all__ = ["fit"]

FITTED = 24  # prompts that the regression sees; more change little

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write, of less than 20 MB.")]
Prompts = Annotated[Path | None, typer.Option(help="JSONL file with chunks and question in each row.")]
Limit = Annotated[int, typer.Option(min=1, help="How many prompts are put together, or read of a file.")]
Questions = Annotated[int, typer.Option(min=0, help="About each prompt, to train the maps; 0 leaves them as fitted.")]
Rank = Annotated[int, typer.Option(min=0, help="Of the map of each layer; 0 is 64, or less for a large model.")]
Seed = Annotated[int, typer.Option(help="Of the order in which texts are put together.")]


def fit(
    corpus: Corpus = None,
    model: Model = None,
    output: Output = Path("correction.safetensors"),
    prompts: Prompts = None,
    limit: Limit = 48,
    questions: Questions = 3,
    chunk_tokens: ChunkTokens = 192,
    rank: Rank = 0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    file_megabytes: FileMegabytes = MEGABYTES,
    file_seconds: FileSeconds = SECONDS,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Fit a correction to a model, from text without labels; without a corpus, from the bundled handbook.

    Texts are put together at random as prompts have them, and a linear map a layer is found, which adds to a stored
    chunk what a prompt would. Then the maps are trained: questions are asked about the texts, and the answers brought
    nearer to those of full prefill. Prompts of your own, as `tune` reads them, do better than those made of a corpus.
    Use the file where a store is opened: ChunkStore.open(…, correction=FILE), or --correction of other commands. It
    costs nothing in a prompt. Chunks that are stored without it, or with another, are not found.

    Examples:
        hf-blend fit --limit 6 --questions 1 --output correction.safetensors --json  # slow
        hf-blend fit documents/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
        hf-blend fit --prompts mine.jsonl --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    import time

    from hf_blend.evaluation.bundled import open_model
    from hf_blend.evaluation.fitting import made_documents, prompts_of, read_documents
    from hf_blend.model.capture import keeps_tokens_alone
    from hf_blend.model.context import default_prefix
    from hf_blend.model.correction import ContextCorrection
    from hf_blend.training.distillation import HELD_OUT, distilled

    if corpus and prompts:
        raise typer.BadParameter("got a corpus and --prompts, expected one of them.")
    source = open_model(model, device, dtype)
    documents = read(corpus or [], FileLimits(file_megabytes, file_seconds), verbose)
    if prompts:
        given = read_documents(prompts, limit, max(questions, 1), seed)
    else:
        texts = list(dict.fromkeys(piece.prompt_text for piece in split(documents, source, chunk_tokens)))
        if len(texts) < 2:
            fail(f"The corpus has {len(texts)} text of up to {chunk_tokens} tokens, expected at least 2. Give more.")
        given = list(made_documents(texts, limit, max(questions, 1), seed))
    loaded, started = source.load(), time.perf_counter()
    listed = list(prompts_of(source.tokenizer, given, seed))
    unlike = listed[:: max(questions, 1)]
    fitted = progress(unlike[:FITTED], "prompts to fit", quiet=json)
    prefix = default_prefix(loaded, source.tokenizer)
    found = ContextCorrection.fit(loaded, fitted, chunk_prefix_ids=prefix, rank=rank or None)
    trained = None
    if questions and keeps_tokens_alone(loaded) and len(unlike) > HELD_OUT:
        trained = distilled(loaded, found, listed, lambda steps: progress(steps, "prompts to train", quiet=json))
        found = trained.correction
    found.save(output)
    document = {
        "correction": str(output),
        "model": found.model,
        "layers": len(found.maps),
        "rank": next(iter(found.maps.values()))[0].shape[1],
        "prefix_tokens": len(found.prefix),
        "texts": len({text for one in given for text in one.texts}),
        "tokens": sum(len(ids) for ids, _ in unlike),
        "divergence": trained and {"alone": trained.alone, "fitted": trained.fitted, "trained": trained.trained},
        "nbytes": output.stat().st_size,
    }
    if json:
        document["left_out"] = documents.left_out
    show(document, as_json=json)
    if not json:
        took = duration(time.perf_counter() - started)
        say(f"Fitted in {took}. Use it: ChunkStore.open(…, correction={str(output)!r}).")
