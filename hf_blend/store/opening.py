# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How a store is opened: where it lives, and how much it may hold."""

import os
import re
from pathlib import Path

from .. import plugins
from ..errors import ConfigError, StoreError
from .tiers.base import Tier

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def check_caps(**caps: int | None) -> None:
    """Refuse a cap below 0 (ConfigError)."""
    for name, value in caps.items():
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            raise ConfigError(f"{name} is {value!r}, expected 0 or more. Leave it out for the default.")


def open_tiers(location: str | Path | None, remote: str | None, *, durable: bool) -> list[Tier]:
    """Open the tiers of a store that keep bytes, the nearest first."""
    if is_remote(location):
        if remote:
            raise ConfigError(
                "location and remote are both URLs, expected one of them (not shown: they may hold a password). Give "
                'ChunkStore.open a directory, or "memory://", and remote=URL.'
            )
        return [open_remote(str(location))]
    behind = [open_remote(remote)] if remote else []  # first: no folder is made for a wrong URL
    root = _resolve(location)
    if root is None:
        return behind
    return [plugins.load("store.tiers", "disk")(root, durable=durable), *behind]


def open_remote(url: str) -> Tier:
    """Open the tier that a URL names."""
    match = _SCHEME.fullmatch(str(url))
    schemes = set()
    for name in plugins.describe("store.tiers") if match else ():
        kind: type[Tier] = plugins.load("store.tiers", name)
        if match and match[1].lower() in kind.schemes:
            return kind.from_url(url)
        schemes |= set(kind.schemes)
    scheme = match[1] if match else "without a scheme"
    raise ConfigError(
        f"no remote tier of the kind {scheme} exists (what follows it is not shown: it may hold a password). Give a "
        f"URL of one of these kinds: {', '.join(sorted(schemes))}."
    )


def is_remote(location: str | Path | None) -> bool:
    """Say whether a location is a URL of something that is not this machine's memory."""
    match = _SCHEME.fullmatch(str(location))
    return match is not None and (match[1].lower() != "memory" or bool(match[2]))


def _resolve(location: str | Path | None) -> Path | None:
    """The folder of a store, also where a process works in another one; None for memory."""
    if location is None:
        return _default_root()
    is_path = isinstance(location, str | os.PathLike)
    if not is_path or not str(location).strip() or "\0" in str(location):
        raise ConfigError(f'location is {location!r}, expected a directory, "memory://" or None for the default.')
    return None if _SCHEME.fullmatch(str(location)) else Path(location).expanduser().absolute()


def _default_root() -> Path:
    home = os.environ.get("HF_BLEND_HOME")
    if home:
        return Path(home).expanduser().absolute() / "chunks"
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path("hf_blend", namespace="chunks", subfolder="store").absolute()
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the assets folder of the Hugging Face cache cannot be used: {error}. Set HF_BLEND_HOME to a directory "
            "that you may write to."
        ) from error
