# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A reference model that reads and writes on for many windows, with a cache of one window.

Stories are read one after the other through a `ShiftCache`. After each story its questions are asked on a copy of the
sequence, and once more after a fresh prefill of just the tokens that the cache still holds: what the two differ by is
what shifting costs. Only questions that the remaining tokens can answer count: fresh prefill is the measure.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import SequenceCache, ShiftCache
from hf_blend.context.size import cache_size
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import questions
from hf_blend.evaluation.world.story import Level, tell

WINDOW_TOKENS = 224  # the longest that the reference model was trained on
KEEP_TOKENS = 1


def measure_context_shift(
    windows: int = 20, seed: int = 3, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Read, and then write, so many windows.

    Args:
        windows: how much text, in windows.
        seed: of the stories and of sampling.
        progress: called with a line of text before each part.

    Returns:
        `reading`: loss on the next story and answers, shifted beside fresh; `writing`: tokens generated, bytes held.
    """
    model, tokenizer = load_model()
    if progress:
        progress(f"reading {windows} windows of {WINDOW_TOKENS} tokens")
    reading = _read(model, tokenizer, windows * WINDOW_TOKENS, Random(seed))
    if progress:
        progress(f"writing {windows} windows")
    return {
        "window_tokens": WINDOW_TOKENS,
        "keep_tokens": KEEP_TOKENS,
        "seed": seed,
        "reading": reading,
        "writing": _write(model, tokenizer, windows * WINDOW_TOKENS, seed),
    }


@torch.no_grad()
def _read(model: nn.Module, tokenizer: Any, tokens: int, random: Random) -> dict[str, Any]:
    cache = ShiftCache(model, window_tokens=WINDOW_TOKENS, keep_tokens=KEEP_TOKENS)
    losses: list[tuple[float, float]] = []
    answers: list[tuple[float, float]] = []
    most_bytes = read = 0
    with cache:
        model(torch.tensor([[tokenizer.bos_token_id]]), past_key_values=cache)
        while read < tokens:
            story, shifts = tell(random, Level(people=(2, 2), facts=(2, 3)), heldout=True), cache.shifts
            for chunk in story.chunks:
                ids = _ids(tokenizer, chunk)
                if cache.shifts > shifts:
                    losses.append(_losses(model, cache, ids))
                    shifts = cache.shifts
                model(ids, past_key_values=cache)
                read += ids.shape[1]
            for question in questions(story):
                answers.append(_answers(model, tokenizer, cache, question))
            most_bytes = max(most_bytes, cache.nbytes)
    shifted, fresh = zip(*losses, strict=True)
    right, right_fresh = zip(*answers, strict=True)
    return {
        "tokens": read,
        "shifts": cache.shifts,
        "most_cache_bytes": most_bytes,
        "loss_shifted": sum(shifted) / len(losses),
        "loss_fresh": sum(fresh) / len(losses),
        "loss_difference_interval": interval([one - two for one, two in losses]),
        "questions": len(answers),
        "answers_shifted": sum(right) / len(answers),
        "answers_fresh": sum(right_fresh) / len(answers),
        "answers_difference_interval": interval([one - two for one, two in answers]),
    }


def _losses(model: nn.Module, cache: ShiftCache, ids: Tensor) -> tuple[float, float]:
    """Mean loss on the next chunk after its first token: behind the shifted cache, and behind a fresh prefill."""
    return tuple(_loss(model, one, ids) for one in (_copied(cache), _fresh(model, cache)))  # type: ignore[return-value]


def _loss(model: nn.Module, cache: SequenceCache, ids: Tensor) -> float:
    with cache:
        logits = model(ids, past_key_values=cache).logits[0, :-1]
    return float(nn.functional.cross_entropy(logits, ids[0, 1:]))


def _answers(model: nn.Module, tokenizer: Any, cache: ShiftCache, question: Any) -> tuple[float, float]:
    """1 for a right answer: behind the shifted cache, and behind a fresh prefill of the tokens that it holds."""
    ids, answer = _ids(tokenizer, question.text), tokenizer.convert_tokens_to_ids(question.answer)
    found = []
    for one in (_copied(cache), _fresh(model, cache)):
        with one:
            found.append(float(model(ids, past_key_values=one).logits[0, -1].argmax() == answer))
    return found[0], found[1]


def _copied(cache: ShiftCache) -> SequenceCache:
    """The same state in a cache of its own, which a question does not disturb."""
    twin = SequenceCache(cache.model)
    twin.restore(cache.state())
    return twin


def _fresh(model: nn.Module, cache: ShiftCache) -> SequenceCache:
    fresh = SequenceCache(model)
    with fresh:
        model(torch.tensor([cache.tokens()]), past_key_values=fresh)
    return fresh


def _write(model: Any, tokenizer: Any, tokens: int, seed: int) -> dict[str, Any]:
    """Let the model write on, sampling; it must not stop, and must stay in its window."""
    cache = ShiftCache(model, window_tokens=WINDOW_TOKENS, keep_tokens=KEEP_TOKENS)
    start = torch.tensor([[tokenizer.bos_token_id, *_ids(tokenizer, "Mara keeps a goat.\n")[0].tolist()]])
    torch.manual_seed(seed)
    output = model.generate(
        start, past_key_values=cache, do_sample=True, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=1
    )
    return {
        "tokens": output.shape[1] - start.shape[1],
        "shifts": cache.shifts,
        "cache_bytes": cache.nbytes,
        "held_tokens": cache.get_seq_length(),
        "unbounded_cache_bytes": cache_size(model.config, context_tokens=output.shape[1]).nbytes,
        "sample": tokenizer.decode(output[0, -40:]),
    }


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
