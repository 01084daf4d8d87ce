# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The question without content that is run behind every chunk while it is computed.

Any question takes most from much the same tokens of a text. This one names nothing, so what it takes is about the text
alone. It is written as the prompts of a chat model end, by the tokenizer's chat template.
"""

import contextlib
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..errors import PromptError
from ..prompt.messages import has_template, render
from .anatomy import per_model
from .calibrate import ignores_states
from .capture import cached_prefix, keeps_tokens_alone

QUESTION = "What is the name of the person, place, date or thing that is asked about?"
PLAIN = f"\n\nQuestion: {QUESTION}\nShort answer:"  # without a chat template
CHUNK = "|||"  # stands for a chunk in a rendered message
MOST_TOKENS = 96  # more show that the tokenizer was made for another language

_known: WeakKeyDictionary[Any, tuple[Any, tuple[int, ...]]] = WeakKeyDictionary()


def question_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """The ids of the question behind a chunk.

    Empty without a tokenizer or with one that lacks its words, and for a model that computes tokens behind cached ones
    otherwise than in one forward with them.
    """
    if not hasattr(tokenizer, "get_vocab") or not _continues(model):
        return ()
    form = (len(tokenizer), getattr(tokenizer, "chat_template", None))
    if tokenizer not in _known or _known[tokenizer][0] != form:
        _known[tokenizer] = form, _encoded(tokenizer)
    return _known[tokenizer][1]


@per_model
def _continues(model: nn.Module) -> bool:
    return bool(cached_prefix(model)) if keeps_tokens_alone(model) else not ignores_states(model)


def _encoded(tokenizer: Any) -> tuple[int, ...]:
    text = PLAIN
    if has_template(tokenizer, {}):
        message = {"role": "user", "content": f"{CHUNK}\n\nQuestion: {QUESTION}"}
        with contextlib.suppress(PromptError):
            rendered = render(tokenizer, [message], add_generation_prompt=True)
            text = rendered.rpartition(CHUNK)[2] if CHUNK in rendered else PLAIN
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    is_readable = 0 < len(ids) <= MOST_TOKENS and getattr(tokenizer, "unk_token_id", None) not in ids
    return ids if is_readable else ()
