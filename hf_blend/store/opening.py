# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How a store is opened: where it lives, how much it may hold, how long, and what leaves first."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import plugins
from ..errors import ConfigError, StoreError
from .budget import BoundedTier
from .eviction.base import EvictionPolicy
from .index import Index
from .memory import MemoryCache, default_memory_bytes
from .tiers.base import Tier

__all__ = ["Limits", "open_remote", "open_tiers"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


@dataclass(frozen=True)
class Limits:
    """Caps and ages of a store, as `ChunkStore.open` takes them.

    `queue_bytes` is for each tier on another machine, `tier_bytes` for each that is not on disk.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    device_bytes: int = 0
    quota_bytes: int | None = None
    ttl_s: float | None = None
    eviction: str = "lru"
    queue_bytes: int = 1 << 30
    tier_bytes: int | None = None

    def check(self) -> None:
        """Refuse a limit below 0 (ConfigError), or a policy that does not exist (PluginNotFoundError)."""
        for name in ("memory_bytes", "disk_bytes", "device_bytes", "quota_bytes", "ttl_s", "queue_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ConfigError(f"{name} is {value!r}, expected 0 or more. Leave it out for the default.")
        self._policy()

    def memories(self, device: str | None = None) -> list[MemoryCache]:
        """Make the caches of chunks ready to use: of the device, if it may hold anything, and of the machine."""
        cap_bytes = default_memory_bytes() if self.memory_bytes is None else self.memory_bytes
        memory = MemoryCache(cap_bytes, self._policy(), ttl_s=self.ttl_s)
        if not device or not self.device_bytes:
            return [memory]
        return [MemoryCache(self.device_bytes, self._policy(), name="device", device=device, ttl_s=self.ttl_s), memory]

    def bound(
        self,
        tier: Tier,
        folder: Path | None,
        owner: str,
        on_fault: Callable[[str], object] | None = None,
    ) -> BoundedTier:
        """Put a tier under its cap: `disk_bytes` on disk, elsewhere `tier_bytes`.

        What is known of it survives a restart in the folder's `index`.
        """
        on_disk, policy = folder is not None and tier.is_local, self._policy()
        return BoundedTier(
            tier,
            self.disk_bytes if on_disk else self.tier_bytes,
            policy,
            Index(folder / "index" / f"{tier.name}.sqlite" if folder else None, policy, on_fault),
            owner=owner,
            spare_bytes=_spare_bytes(folder) if on_disk and folder and self.disk_bytes is None else None,
            quota_bytes=self.quota_bytes,
        )

    def _policy(self) -> EvictionPolicy:
        policy: EvictionPolicy = plugins.load("store.eviction", self.eviction)()
        return policy


def _spare_bytes(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free // 2
    return None


def open_tiers(
    location: str | Path | None, remote: str | None, *, durable: bool, deadline_s: float | None = None
) -> tuple[Path | None, list[Tier]]:
    """Open the tiers of a store that keep bytes."""
    if is_remote(location):
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


def is_remote(location: str | Path | None) -> bool:
    """Whether a location is a URL of something that is not this machine's memory."""
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
