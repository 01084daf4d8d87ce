# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where a store lives: a directory, the assets folder of the Hugging Face cache, or memory alone."""

import os
import re
from pathlib import Path

from .. import plugins
from ..errors import ConfigError, StoreError
from .tiers.base import Tier

__all__ = ["open_remote", "open_tiers"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def open_tiers(
    location: str | Path | None, remote: str | None, *, durable: bool, deadline_s: float | None = None
) -> tuple[Path | None, list[Tier]]:
    """Open the tiers of a store that keep bytes."""
    if _is_remote(location):
        if remote:
            raise ConfigError(
                "location and remote are both URLs, expected one of them (not shown: they may hold a password). Give "
                'ChunkStore.open a directory, or "memory://", and remote=URL.'
            )
        return None, [open_remote(str(location), deadline_s)]
    behind = [open_remote(remote, deadline_s)] if remote else []  # first: no folder is made for a wrong URL
    root = _resolve(location)
    tiers: list[Tier] = [plugins.load("store.tiers", "disk")(root, durable=durable)] if root else []
    return root, [*tiers, *behind]


def open_remote(url: str, deadline_s: float | None = None) -> Tier:
    """Open the tier that a URL names."""
    match = _SCHEME.fullmatch(str(url))
    schemes = set()
    for name in plugins.describe("store.tiers") if match else ():
        kind: type[Tier] = plugins.load("store.tiers", name)
        if match and match[1].lower() in kind.schemes:
            return kind.from_url(url, deadline_s)
        schemes |= set(kind.schemes)
    scheme = match[1] if match else "without a scheme"
    raise ConfigError(
        f"no remote tier of the kind {scheme} exists (what follows it is not shown: it may hold a password). Give a "
        f"URL of one of these kinds: {', '.join(sorted(schemes))}."
    )


def _is_remote(location: str | Path | None) -> bool:
    match = _SCHEME.fullmatch(str(location))
    return match is not None and (match[1].lower() != "memory" or bool(match[2]))


def _resolve(location: str | Path | None) -> Path | None:
    if location is None:
        return _default_root()
    is_path = isinstance(location, str | os.PathLike)
    if not is_path or not str(location).strip() or "\0" in str(location):
        raise ConfigError(f'location is {location!r}, expected a directory, "memory://" or None for the default.')
    return None if _SCHEME.fullmatch(str(location)) else Path(location).expanduser()


def _default_root() -> Path:
    home = os.environ.get("HF_BLEND_HOME")
    if home:
        return Path(home).expanduser() / "chunks"
    from huggingface_hub import cached_assets_path

    try:
        return cached_assets_path("hf_blend", namespace="chunks", subfolder="store")
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the assets folder of the Hugging Face cache cannot be used: {error}. Set HF_BLEND_HOME to a directory "
            "that you may write to."
        ) from error
