# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who may ask: tenants with their keys, secrets and stores, and how many of their requests are under way at once.

It knows no engine: the server and the proxy in front of vLLM share it.
"""

import hashlib
import hmac
import json
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PromptError
from ..store import ChunkStore
from .wire import Busy, Limits

__all__ = ["Tenant", "Tenants", "admitted", "check_key", "read_tenants"]

LEAST_KEY = 16  # characters of an API key
FIELDS = ("name", "api_key", "secret", "max_requests", "quota_bytes")


@dataclass(frozen=True)
class Tenant:
    """A client with a key, a namespace in the store, and limits of its own."""

    name: str = ""
    api_key: str = ""
    secret: bytes | None = None
    max_requests: int | None = None
    quota_bytes: int | None = None

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"  # keys and secrets stay out of logs

    @property
    def salt(self) -> tuple[int, ...]:
        """Words that keep the engine's blocks of this tenant from others; empty for a tenant without a name."""
        if not self.name:
            return ()
        digest = hmac.new(self.secret or b"", f"hf_blend.salt\0{self.name}".encode(), "sha256").digest()
        return tuple(word >> 1 for word in struct.unpack("<8I", digest))


class Tenants:
    """All tenants and their stores."""

    def __init__(self, tenants: Sequence[Tenant], open_store: Callable[[Tenant], ChunkStore]) -> None:
        self._by_key = {_hashed(tenant.api_key): tenant for tenant in tenants}
        self.stores = {tenant.name: open_store(tenant) for tenant in tenants}
        self.needs_key = any(tenant.api_key for tenant in tenants)

    def find(self, header: str | None) -> Tenant | None:
        """Return the tenant of a request by its `authorization` header."""
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
    tenants = [_tenant(row, f"tenant {number} of {str(path)!r}") for number, row in enumerate(rows)]
    for name in ("name", "api_key"):
        values = [getattr(tenant, name) for tenant in tenants]
        if len(set(values)) < len(values):
            raise ConfigError(f"two tenants in {str(path)!r} have the same {name}. Give each its own.")
    return tenants


def check_key(key: Any, what: str) -> str:
    """Refuse a key that headers cannot hold, or that is soon guessed."""
    if not isinstance(key, str) or len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{what} has no api_key of {LEAST_KEY} or more printable characters. Draw one at random.")
    return key


def _tenant(row: Any, what: str) -> Tenant:
    if not isinstance(row, dict) or not set(row) <= set(FIELDS):
        fields = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ConfigError(f"{what} has {fields}, expected fields among {', '.join(FIELDS)}.")
    name, key, secret, *numbers = (row.get(field) for field in FIELDS)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} has no name. Give it one: it is the namespace of its chunks.")
    key = check_key(key, what)
    for number, most in zip(FIELDS[3:], numbers, strict=True):
        if most is not None and (type(most) is not int or most < 1):
            raise ConfigError(f"{what} has {number}={most!r}, expected a number from 1 on, or none.")
    try:
        raw = bytes.fromhex(secret) if secret is not None else None
    except (TypeError, ValueError):
        raw = b""
    if raw is not None and len(raw) < 32:
        raise ConfigError(f"{what} has a secret that is not 64 or more hex digits: secrets.token_hex(32) makes one.")
    return Tenant(name, key, raw, *numbers)


def _hashed(key: str) -> bytes:
    """Return the hash of a key. Keys are compared by their hashes: the time it takes says nothing about them."""
    return hashlib.sha256(key.encode()).digest()


@asynccontextmanager
async def admitted(running: Counter[str], limits: Limits, tenant: Tenant, answers: int = 1) -> AsyncIterator[None]:
    """Count the answers of a request as under way, by tenant, or refuse it.

    A tenant that has none under way is admitted whatever the others have.
    """
    own, all_of_them = running[tenant.name], running.total()
    limit = limits.requests if tenant.max_requests is None else tenant.max_requests
    if answers > 1 and answers > min(limit, limits.requests):
        raise PromptError(f"{answers} answers were asked for, expected at most {limit}. Ask for fewer at once.")
    if own + answers > limit or (own and all_of_them + answers > limits.requests):
        raise Busy(f"{own if own + answers > limit else all_of_them} requests are under way. Try again in a moment.")
    running[tenant.name] += answers
    try:
        yield
    finally:
        running[tenant.name] -= answers
