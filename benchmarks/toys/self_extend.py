# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Reading beyond the trained length: questions about a story that stands among sentences that say nothing.

The needle is a whole story of the reference model's world, at a random place among filler chunks, the question at the
end. Each length is asked plainly and with Self-Extend, the same prompts for both.
"""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from random import Random
from typing import Any

import torch

from hf_blend.context.self_extend import self_extend
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import Example, sample_examples
from hf_blend.evaluation.world.words import FILLERS

TRAINED_TOKENS = 224  # of the reference model, see its card
ANSWER_TOKENS = 3


def measure_self_extend(
    times: tuple[int, ...] = (1, 2, 4), count: int = 200, seed: int = 5, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Ask questions at multiples of the trained length, with and without.

    Args:
        times: prompt lengths, as multiples of the trained length; 1 leaves the prompts as they are.
        count: questions at each length.
        seed: of stories and places.
        progress: called with a line of text before each length.

    Returns:
        `rows`, one for each length.
    """
    model, tokenizer = load_model()
    examples, rows = sample_examples(count, seed), []
    for multiple in times:
        prompts = _prompts(tokenizer, examples, multiple, Random(seed))
        longest = max(map(len, prompts))
        if progress:
            progress(f"{multiple} x {TRAINED_TOKENS} tokens, {count} questions")
        plain, _ = _ask(model, tokenizer, examples, prompts, None)
        extended, chosen = _ask(model, tokenizer, examples, prompts, max(longest + ANSWER_TOKENS, TRAINED_TOKENS + 1))
        rows.append(
            {
                "times_trained": multiple,
                "mean_tokens": sum(map(len, prompts)) / count,
                "n": count,
                "plain": sum(plain) / count,
                "plain_interval": interval(plain),
                "extended": sum(extended) / count,
                "extended_interval": interval(extended),
                "gain_interval": interval([new - old for new, old in zip(extended, plain, strict=True)]),
                **chosen,
            }
        )
    return {"trained_tokens": TRAINED_TOKENS, "seed": seed, "rows": rows}


def _prompts(tokenizer: Any, examples: list[Example], multiple: int, random: Random) -> list[list[int]]:
    tokens = multiple * TRAINED_TOKENS * (multiple > 1)
    return [story_prompt(tokenizer, example, tokens, random) for example in examples]


def story_prompt(tokenizer: Any, example: Example, tokens: int, random: Random) -> list[int]:
    """Put a story among sentences that say nothing.

    Args:
        tokenizer: the reference model's.
        example: the story and its question.
        tokens: how long the prompt is at least.
        random: places the story.

    Returns:
        BOS, filler, the story, filler, the question.
    """
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    story = [token for chunk in example.chunks for token in encode(chunk)]
    question, filler = encode(example.question), list[list[int]]()
    while 1 + len(story) + len(question) + sum(map(len, filler)) < tokens:
        filler.append(encode(random.choice(FILLERS) + "\n"))
    place = random.randint(0, len(filler))
    before, after = (list(chain(*part)) for part in (filler[:place], filler[place:]))
    return [tokenizer.bos_token_id, *before, *story, *after, *question]


@torch.no_grad()
def _ask(
    model: Any, tokenizer: Any, examples: list[Example], prompts: list[list[int]], longest: int | None
) -> tuple[list[float], dict[str, int]]:
    """1 for each right answer, 0 for the others; and the extension that was chosen."""
    block: Any = nullcontext()
    if longest is not None:
        block = self_extend(model, trained_tokens=TRAINED_TOKENS, max_tokens=longest)
    right, chosen = [], {}
    with block as extension:
        if extension:
            chosen = {"window_tokens": extension.window_tokens, "group_tokens": extension.group_tokens}
        for example, prompt in zip(examples, prompts, strict=True):
            output = model.generate(torch.tensor([prompt]), max_new_tokens=ANSWER_TOKENS, do_sample=False)
            text = tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True)
            right.append(float(text.strip() == example.answer))
    return right, chosen
