# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which tokenizer made some ids: a digest that is stored with chunks, so that another one can be named."""

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["tokenizer_digest"]

# letters, digits, white space, marks and scripts that tokenizers treat apart
_PROBE = "The cats' 2026 naïve  test,\n\n\tline — 日本語 🙂 Привет مرحبا <|im_end|> </s> [INST] don't\r\n "

_known: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str:
    """Name a tokenizer by its vocabulary and by what it makes of a line of text; padding and truncation are no part.

    Args:
        tokenizer: of transformers; asked once, and again after tokens were added to it.

    Returns:
        12 hex digits; empty for None and for what has no vocabulary.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    size, known = len(tokenizer), _known.get(tokenizer)
    if known is None or known[0] != size:
        made = tokenizer.encode(_PROBE, add_special_tokens=False)
        content = json.dumps([sorted(tokenizer.get_vocab().items()), list(made)])
        known = _known[tokenizer] = size, hashlib.sha256(content.encode()).hexdigest()[:12]
    return known[1]
