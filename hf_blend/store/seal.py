# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Seals show that a file is what was written and, where the store has a secret, who wrote it.

A seal is checked over the raw bytes of a file before any of them is parsed. Without a secret it is a plain SHA-256:
it finds damage, and anybody can make one. With a secret it is an HMAC-SHA256 that names the secret by a public tag,
so that files of another secret are told apart from files that were damaged or forged.
"""

import functools
import hashlib
import hmac
from typing import Any

import xxhash

from ..errors import ConfigError
from .tiers.base import EntryFault

__all__ = ["check_seal", "check_secret", "content_hasher", "keyed", "seal", "seal_size"]

_PLAIN, _SIGNED = b"sha256:", b"hmac-sha256:"
_TAG_DIGITS = 16


def check_secret(secret: object) -> bytes | None:
    """Refuse a secret that cannot sign."""
    if secret is None or (isinstance(secret, bytes) and secret):
        return secret
    got = "b''" if isinstance(secret, bytes) else f"a {type(secret).__name__}"
    raise ConfigError(
        f"secret is {got}, expected bytes that are not empty, or None. Make one by secrets.token_bytes(32), keep it "
        "away from the store's folder, and give text as text.encode()."
    )


def seal(secret: bytes | None, *content: bytes) -> bytes:
    """Seal some content."""
    method = _method(secret)
    state: Any = hashlib.sha256() if secret is None else hmac.new(secret, digestmod=hashlib.sha256)
    state.update(b"hf_blend.seal\0")
    for piece in content:
        state.update(piece)
    return method + state.hexdigest().encode()


def seal_size(secret: bytes | None) -> int:
    """How many bytes a seal takes."""
    return len(_method(secret)) + 2 * hashlib.sha256().digest_size


def check_seal(tag: bytes, secret: bytes | None, *content: bytes) -> None:
    """Compare the seal of a file with its content."""
    if hmac.compare_digest(tag, seal(secret, *content)):
        return
    if tag.startswith(_method(secret)):
        raise EntryFault(
            "auth" if secret else "format", f"the seal does not fit the {sum(map(len, content))} bytes behind it"
        )
    if tag.startswith((_PLAIN, _SIGNED)):
        expected = "signed with the store's secret" if secret else "unsigned"
        raise EntryFault("secret", f"expected {expected}, got one sealed in another way", corrupt=False)
    raise EntryFault("format", f"there is no seal: {tag[:20]!r}")


def keyed(secret: bytes | None, purpose: str, text: str) -> str:
    """Hide a name from those who do not know the secret."""
    if secret is None:
        return text
    content = f"hf_blend.{purpose}\0{text}".encode()
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def content_hasher(secret: bytes | None) -> Any:
    """What digests tensors: fast against accidents, cryptographic where a sealed header binds the digest."""
    return xxhash.xxh3_128() if secret is None else hashlib.sha256()


@functools.lru_cache(maxsize=16)
def _method(secret: bytes | None) -> bytes:
    return _PLAIN if secret is None else _SIGNED + keyed(secret, "tag", "")[:_TAG_DIGITS].encode() + b":"
