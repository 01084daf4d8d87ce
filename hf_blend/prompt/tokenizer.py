# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The special tokens that a tokenizer adds, and a digest of it that is stored with chunks."""

import hashlib
import json
from typing import Any
from weakref import WeakKeyDictionary

SAMPLED = 1024  # words of a vocabulary, about: to sort all of it takes as long as a short prompt
# letters, digits, white space, marks and scripts that tokenizers treat apart
_PROBE = "The cats' 2026 naïve  test,\n\n\tline — 日本語 🙂 Привет مرحبا <|im_end|> </s> [INST] don't\r\n "

_known: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what tells tokenizers apart: size, a sample of the vocabulary, and the ids of a line of text."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    size = len(tokenizer)
    cached = _known.get(tokenizer)
    if cached is not None and cached[0] == size:
        return cached[1]
    made = tokenizer.encode(_PROBE, add_special_tokens=False)
    step = max(1, size // SAMPLED)
    sample = sorted(item for item in tokenizer.get_vocab().items() if item[1] % step == 0)
    content = json.dumps([size, sample, list(made)])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    _known[tokenizer] = size, digest
    return digest


def front_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text, such as BOS; it may put none."""
    if tokenizer is None:
        return ()
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    made = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(made)):
        if made[start : start + len(bare)] == bare:
            return tuple(made[:start])
    return ()


def inner_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text between two others; at the edge of a text, white space may have other tokens."""
    edge = list(tokenizer.encode("a", add_special_tokens=False))
    made = list(tokenizer.encode(f"a{text}a", add_special_tokens=False))
    stop = len(made) - len(edge)
    if made[: len(edge)] == edge == made[stop:]:
        return tuple(made[len(edge) : stop])
    return tuple(tokenizer.encode(text, add_special_tokens=False))
