# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Who may ask: tenants, each with a key for requests and a namespace of the store, read from a file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError

__all__ = ["Tenant", "check_key", "read_tenants"]

LEAST_KEY = 16  # characters of an API key
LEAST_SECRET = 32  # bytes
FIELDS = ("name", "api_key", "secret")


@dataclass(frozen=True)
class Tenant:
    """A client: its namespace in the store, the key that its requests bear, and the secret of its salts in vLLM."""

    name: str = ""
    api_key: str = ""
    secret: bytes | None = None

    def __repr__(self) -> str:
        return f"Tenant({self.name!r})"  # keys and secrets stay out of logs


def read_tenants(path: Path) -> list[Tenant]:
    """Read the file of tenants, `{"tenants": [{"name": …, "api_key": …, "secret": …}]}`."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tenants in {str(path)!r} cannot be read ({error}). Give a JSON file.") from error
    rows = content.get("tenants") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f'{str(path)!r} names no tenant, but {{"tenants": [{{…}}]}} with at least one is expected.')
    tenants = [_tenant(row, f"tenant {number} of {str(path)!r}") for number, row in enumerate(rows)]
    for field in ("name", "api_key"):
        values = {getattr(tenant, field) for tenant in tenants}
        if len(values) < len(tenants):
            raise ConfigError(f"two tenants in {str(path)!r} have the same {field}. Give each its own.")
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
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{what} has no name. Give it one: it is the namespace of its chunks.")
    key = check_key(row.get("api_key"), what)
    secret = None
    if row.get("secret") is not None:
        try:
            secret = bytes.fromhex(row["secret"])
        except (TypeError, ValueError):
            secret = b""
        if len(secret) < LEAST_SECRET:
            raise ConfigError(
                f"{what} has a secret that is not 64 or more hex digits: secrets.token_hex(32) makes one."
            )
    return Tenant(name, key, secret)
