# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Fit what other text adds to a chunk's K and V, once per model: stored chunks are then nearer to full prefill."""

from pathlib import Path
from typing import Annotated

import typer

from .options import ChunkTokens, Corpus, Device, Dtype, Model
from .output import Json, duration, fail, progress, say, show
from .reading import read, split

__all__ = ["fit"]

Output = Annotated[Path, typer.Option("--output", "-o", help="File to write, of less than 20 MB.")]
Prompts = Annotated[int, typer.Option(min=1, help="How many prompts are put together from the corpus.")]
Rank = Annotated[int, typer.Option(min=0, help="Of the map of each layer; 0 is 64, or less for a large model.")]
Seed = Annotated[int, typer.Option(help="Of the order in which texts are put together.")]


def fit(
    corpus: Corpus = None,
    model: Model = None,
    output: Output = Path("correction.safetensors"),
    prompts: Prompts = 24,
    chunk_tokens: ChunkTokens = 192,
    rank: Rank = 0,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    json: Json = False,
) -> None:
    """Fit a correction to a model, from text without labels; without a corpus, from the bundled handbook.

    Texts are put together at random as prompts have them, and a linear map a layer is found, which adds to a stored
    chunk what a prompt would. Use the file where a store is opened: ChunkStore.open(…, correction=FILE), or
    --correction of other commands. It costs nothing in a prompt. Chunks that are stored without it, or with another,
    are not found. Some 30,000 tokens of text like yours do.

    Examples:
        hf-blend fit --prompts 1 --output correction.safetensors --json  # slow
        hf-blend fit documents/ --model HuggingFaceTB/SmolLM2-135M-Instruct  # network
    """
    import time

    from hf_blend.evaluation.bundled import open_model
    from hf_blend.evaluation.fitting import prompts_of
    from hf_blend.evaluation.indexing import bundled_pieces
    from hf_blend.model.context import default_prefix
    from hf_blend.model.correction import ContextCorrection

    documents = read(corpus or [])
    source = open_model(model, device, dtype)
    pieces = split(documents, source, chunk_tokens) if documents else list(bundled_pieces(source.tokenizer))
    texts = list(dict.fromkeys(piece.prompt_text for piece in pieces))
    if len(texts) < 2:
        fail(f"The corpus has {len(texts)} text of up to {chunk_tokens} tokens, expected at least 2. Give more of it.")
    loaded, started = source.load(), time.perf_counter()
    listed = list(prompts_of(source.tokenizer, texts, prompts, seed))
    given = progress(listed, "prompts", quiet=json)
    prefix = default_prefix(loaded, source.tokenizer)
    found = ContextCorrection.fit(loaded, given, chunk_prefix_ids=prefix, rank=rank or None)
    found.save(output)
    document = {
        "correction": str(output),
        "model": found.model,
        "layers": len(found.maps),
        "rank": next(iter(found.maps.values()))[0].shape[1],
        "prefix_tokens": len(found.prefix),
        "texts": len(texts),
        "tokens": sum(len(ids) for ids, _ in listed),
        "nbytes": output.stat().st_size,
    }
    show(document, as_json=json)
    if not json:
        took = duration(time.perf_counter() - started)
        say(f"Fitted in {took}. Use it: ChunkStore.open(…, correction={str(output)!r}).")
