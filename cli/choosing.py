# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a command takes where nothing is said: the model, and how many pieces of documents it reads; said in a line."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .output import progress, say

if TYPE_CHECKING:
    from hf_blend import ChunkStore
    from hf_blend.evaluation.bundled import ModelSource
    from hf_blend.evaluation.meaning import Encoder, Meaning
    from hf_blend.evaluation.model_choice import Check
    from hf_blend.evaluation.retrieving import Piece

COST = "First token after {:.2f} s: {reused_tokens} of {prompt_tokens} tokens reused, {recomputed_tokens} recomputed."
LOOP = "It began to repeat itself and was stopped: {}. Take a smaller --top-k, a higher --ratio or a larger --model."


def open_source(
    model: str | None, device: str, dtype: str, verbose: bool = False, weights: str = "auto", check: "Check" = None
) -> "ModelSource":
    """Open the model that is named, else the best that is here; say which, and with `verbose` what was passed over."""
    if model is not None:
        from hf_blend.evaluation.bundled import open_model

        return open_model(model, device, dtype, weights)
    from hf_blend.evaluation.model_choice import choose_model

    choice = choose_model(device, dtype, weights=weights, check=check)
    say(choice.reason)
    for line in choice.skipped if verbose else ():
        say(f"Not taken: {line}")
    return choice.source


def top_k_or_default(
    top_k: int | None, source: "ModelSource", pieces: "Sequence[Piece]", max_new_tokens: int = 1
) -> int:
    """How many pieces are read for a question; 0 for all that fit."""
    from hf_blend.evaluation.bundled import size_of
    from hf_blend.evaluation.model_choice import choose_top_k

    if top_k is not None:
        return top_k
    chosen = choose_top_k(source, pieces, max_new_tokens)
    if chosen < len(pieces):
        size = size_of(source.parameters)
        say(f"{chosen} of {len(pieces)} pieces are read for a question, as suits {size}; --top-k says another number.")
    return chosen


def open_encoder(name: str | None, device: str) -> "Encoder | None":
    """Open the sentence encoder that --meaning names, before anything else is read."""
    if name is None:
        return None
    from hf_blend.evaluation.meaning import Encoder

    return Encoder(name, device)


def meaning_of(
    encoder: "Encoder | None", pieces: "Sequence[Piece]", store: "ChunkStore | None", quiet: bool = False
) -> "Meaning | None":
    """What ranks pieces by meaning, where an encoder was named."""
    if encoder is None:
        return None
    from hf_blend.evaluation.meaning import Meaning

    return Meaning(encoder, pieces, store, lambda batches: progress(batches, "batches embedded", quiet=quiet))
