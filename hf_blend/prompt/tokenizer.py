# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The special tokens that a tokenizer adds, and a digest of it that is stored with chunks."""

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

# letters, digits, white space, marks and scripts that tokenizers treat apart
_PROBE = "The cats' 2026 naïve  test,\n\n\tline — 日本語 🙂 Привет مرحبا <|im_end|> </s> [INST] don't\r\n "

_known: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary and of its ids of a line of text, without padding and truncation."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    size, cached = len(tokenizer), _known.get(tokenizer)
    if cached is None or cached[0] != size:
        made = tokenizer.encode(_PROBE, add_special_tokens=False)
        content = json.dumps([sorted(tokenizer.get_vocab().items()), list(made)])
        cached = _known[tokenizer] = size, hashlib.sha256(content.encode()).hexdigest()[:12]
    return cached[1]


def front_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text, such as BOS; it may put none."""
    if tokenizer is None:
        return ()
    bare, made = (list(tokenizer.encode("a", add_special_tokens=special)) for special in (False, True))
    count = next((at for at in range(len(made)) if made[at : at + len(bare)] == bare), 0)
    return tuple(made[:count])


def inner_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text between two others; at the edge of a text, white space may have other tokens."""
    alone, edge, made = (list(tokenizer.encode(s, add_special_tokens=False)) for s in (text, "a", f"a{text}a"))
    is_between = made[: len(edge)] == edge == made[len(made) - len(edge) :]
    return tuple(made[len(edge) : len(made) - len(edge)] if is_between else alone)
