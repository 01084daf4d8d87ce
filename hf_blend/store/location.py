# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where a store lives: a directory, the assets folder of the Hugging Face cache, or memory alone."""

import os
import re
from pathlib import Path

from .. import plugins
from ..errors import ConfigError, StoreError
from .tiers.base import Tier

__all__ = ["open_remote", "resolve_location"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def resolve_location(location: str | Path | None) -> Path | None:
    """Find the directory of a store.

    Args:
        location: a directory, "memory://", or None for the default: `$HF_BLEND_HOME/chunks`, or else the assets folder
            of the Hugging Face cache.

    Returns:
        The directory, or None for a store that keeps nothing on disk.

    Raises:
        ConfigError: the location is of a kind that does not exist.
    """
    if location is None:
        return _default_root()
    match = _SCHEME.fullmatch(str(location))
    if match is None:
        if not str(location).strip() or "\0" in str(location):
            raise ConfigError(
                f'location is {str(location)!r}, wanted a directory, "memory://" or None for the default.'
            )
        return Path(location).expanduser()
    if match[1].lower() == "memory" and not match[2]:
        return None
    raise ConfigError(
        f"no store of the kind {match[1]}:// exists (what follows it is not shown: it may hold a password). "
        'Give ChunkStore.open a directory, or "memory://".'
    )


def open_remote(url: str) -> Tier:
    """Open the tier that a URL names.

    Args:
        url: such as `redis://host:6379/0` or `s3://bucket/folder`.

    Returns:
        The tier of the first kind that knows the scheme.

    Raises:
        ConfigError: no kind of tier knows it.
    """
    match = _SCHEME.fullmatch(url)
    schemes = set()
    for name in plugins.describe("store.tiers") if match else ():
        kind: type[Tier] = plugins.load("store.tiers", name)
        if match and match[1].lower() in kind.schemes:
            return kind.from_url(url)
        schemes |= set(kind.schemes)
    asked = match[1] if match else "without a scheme"
    raise ConfigError(
        f"no remote tier of the kind {asked} exists (what follows it is not shown: it may hold a password). Give a "
        f"URL of one of these kinds: {', '.join(sorted(schemes))}."
    )


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
