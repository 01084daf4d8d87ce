# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ids for the tokens of an image, made of its content, so that it is a chunk like any other.

All images have the same placeholder id. In the key of a chunk each placeholder is replaced by a number above every
vocabulary, drawn from a digest of the image: equal images have equal ids, and different ones share none. The model
never sees these ids.
"""

import hashlib

FIRST = 1 << 30  # vocabularies end far below, and ids in a key end above
LEAST_TOKENS = 4  # 30 bits each: with fewer two images might share a name


def content_ids(digest: str, tokens: int) -> tuple[int, ...]:
    """The ids of an image's tokens."""
    drawn = hashlib.shake_256(f"hf_blend.content/1 {tokens} {digest}".encode()).digest(4 * tokens)
    return tuple(FIRST | int.from_bytes(drawn[at : at + 4], "little") & (FIRST - 1) for at in range(0, 4 * tokens, 4))


def is_content(token_id: int) -> bool:
    """Whether an id in a key is that of an image token."""
    return token_id >= FIRST
