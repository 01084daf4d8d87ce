# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts of unlabelled text that a correction is fitted on; what `hf-blend fit` does."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from hf_blend.prompt.messages import build_messages
from hf_blend.prompt.pieces import Span
from hf_blend.prompt.text import build_text

PROMPTS = 24
CHUNKS = 8  # of a prompt
QUESTION = "What do these documents say?"


def prompts_of(
    tokenizer: Any, texts: Sequence[str], prompts: int = PROMPTS, seed: int = 0
) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
    """Put texts together at random, as a prompt has them: ids, and where each text is in them.

    No text is in a prompt twice; all are used before one is used again.
    """
    draw, left = random.Random(seed), list[str]()
    unlike = list(dict.fromkeys(texts))
    for _ in range(prompts):
        own = list[str]()
        while len(own) < min(CHUNKS, len(unlike)):
            left = left or draw.sample(unlike, len(unlike))
            text = left.pop()
            if not any(text in other or other in text for other in own):
                own.append(text)
            elif not left and len(own) > 1:
                break
        text = "\n\n".join(own)
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]
            prompt = build_messages(tokenizer, messages, own, {})
        else:
            prompt = build_text(tokenizer, f"{text}\n\n{QUESTION}", own, special=True)
        yield prompt.ids, prompt.spans()
