# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who may ask: API keys, and for each tenant a namespace and a secret of its own in the store.

{"tenants": [{"name": "search", "api_key": "sk-…", "secret": "64 hex digits"}, …]}
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..store import ChunkStore

__all__ = ["Tenant", "Tenants", "read_tenants"]

LEAST_KEY = 16  # characters of an API key
FIELDS = ("name", "api_key", "secret", "max_requests", "quota_bytes")


@dataclass(frozen=True)
class Tenant:
    """One who may ask."""

    name: str = ""
    api_key: str = ""
    secret: bytes | None = None
    max_requests: int | None = None
    quota_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"  # keys and secrets stay out of logs

    @property
    def salt(self) -> tuple[int, ...]:
        """What keeps the engine's blocks of this tenant from others; empty where there are none."""
        if not self.name:
            return ()
        digest = hmac.new(self.secret or b"", f"hf_blend.salt\0{self.name}".encode(), "sha256").digest()
        return tuple(word >> 1 for word in struct.unpack("<8I", digest))


class Tenants:
    """All who may ask, and their stores."""

    def __init__(self, tenants: Sequence[Tenant], open_store: Callable[[Tenant], ChunkStore]) -> None:
        self._by_key = {_hashed(tenant.api_key): tenant for tenant in tenants}
        self.stores = {tenant.name: open_store(tenant) for tenant in tenants}
        self.needs_key = any(tenant.api_key for tenant in tenants)

    def find(self, header: str | None) -> Tenant | None:
        """Who a request is from."""
        if not self.needs_key:
            return next(iter(self._by_key.values()))
        kind, _, key = (header or "").partition(" ")
        return self._by_key.get(_hashed(key.strip())) if kind.lower() == "bearer" and key.strip() else None

    def close(self) -> None:
        """Close all stores."""
        for store in self.stores.values():
            store.close()


def read_tenants(path: Path) -> list[Tenant]:
    """Read the file of tenants."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tenants in {str(path)!r} cannot be read ({error}). Give a JSON file.") from error
    rows = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f'{str(path)!r} names no tenant, but {{"tenants": [{{…}}]}} with at least one is expected.')
    found = [_tenant(row, f"tenant {number} of {str(path)!r}") for number, row in enumerate(rows)]
    for field in ("name", "api_key"):
        values = [getattr(tenant, field) for tenant in found]
        if len(set(values)) < len(values):
            raise ConfigError(f"two tenants in {str(path)!r} have the same {field}. Give each its own.")
    return found


def _tenant(row: Any, what: str) -> Tenant:
    if not isinstance(row, dict) or not set(row) <= set(FIELDS):
        given = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f"{what} has {given}, expected fields among {', '.join(FIELDS)}.")
    name, key, secret, *numbers = (row.get(field) for field in FIELDS)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} has no name. Give it one: it is the namespace of its chunks.")
    if not isinstance(key, str) or len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{what} has no api_key of {LEAST_KEY} or more printable characters. Draw one at random.")
    for field, most in zip(FIELDS[3:], numbers, strict=True):
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"{what} has {field}={most!r}, expected a number from 1 on, or none.")
    try:
        raw = bytes.fromhex(secret) if secret is not None else None
    except (TypeError, ValueError):
        raw = b""
    if raw is not None and len(raw) < 32:
        raise ConfigError(f"{what} has a secret that is not 64 or more hex digits: secrets.token_hex(32) makes one.")
    return Tenant(name, key, raw, *numbers)


def _hashed(key: str) -> bytes:
    """Keys are compared by their hashes: how long that takes says nothing about them."""
    return hashlib.sha256(key.encode()).digest()
