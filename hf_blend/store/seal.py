# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A seal shows that the header of a file is what was written: SHA-256 over its raw bytes, before any is parsed."""

import hashlib

from .tiers.base import EntryFault

__all__ = ["SEAL_SIZE", "check_seal", "seal"]

_METHOD = b"sha256:"
SEAL_SIZE = len(_METHOD) + 2 * hashlib.sha256().digest_size


def seal(*content: bytes) -> bytes:
    """Seal some content."""
    state = hashlib.sha256(b"hf_blend.seal\0")
    for piece in content:
        state.update(piece)
    return _METHOD + state.hexdigest().encode()


def check_seal(tag: bytes, *content: bytes) -> None:
    """Compare the seal of a file with its content."""
    if tag != seal(*content):
        raise EntryFault("format", f"the seal does not fit the {sum(map(len, content))} bytes behind it: {tag[:20]!r}")
