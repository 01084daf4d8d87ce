# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much a store may hold, how long, and who leaves first."""

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import plugins
from ..errors import ConfigError
from .bounded import BoundedTier
from .held import HeldChunks, default_memory_bytes
from .tiers.base import Tier

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Caps and ages of a store.

    Attributes:
        memory_bytes: of the memory tier; None is a quarter of what is available.
        disk_bytes: of the tier on disk, over all namespaces; None is what it holds and half of what is free.
        device_bytes: of the memory of a device.
        quota_bytes: of one namespace in each tier that keeps bytes; None is up to the cap.
        ttl_s: age in seconds at which a chunk is no longer used; None is never.
        eviction: name of a policy.
        queue_bytes: most that may wait to be written to each tier on another machine.
    """

    memory_bytes: int | None = None
    disk_bytes: int | None = None
    device_bytes: int = 0
    quota_bytes: int | None = None
    ttl_s: float | None = None
    eviction: str = "lru"
    queue_bytes: int = 1 << 30

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: a limit below 0.
            PluginNotFoundError: no policy of that name.
        """
        for name in ("memory_bytes", "disk_bytes", "device_bytes", "quota_bytes", "ttl_s", "queue_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ConfigError(f"{name} is {value!r}, expected 0 or more. Leave it out for the default.")
        plugins.load("store.eviction", self.eviction)

    def hold(self, device: str | None = None) -> list[HeldChunks]:
        """Make the places that hold chunks ready to use.

        Args:
            device: where `device_bytes` are held.

        Returns:
            The device, if it may hold anything, and memory.
        """
        policy = plugins.load("store.eviction", self.eviction)
        memory_bytes = default_memory_bytes() if self.memory_bytes is None else self.memory_bytes
        memory = HeldChunks(memory_bytes, policy(), ttl_s=self.ttl_s)
        if not device or not self.device_bytes:
            return [memory]
        return [HeldChunks(self.device_bytes, policy(), name="device", device=device, ttl_s=self.ttl_s), memory]

    def bound(
        self,
        tier: Tier,
        index: Path | None,
        owned: Callable[[str], bool],
        on_evicted: Callable[[str, str], None],
        on_fault: Callable[[str], None] | None = None,
    ) -> BoundedTier:
        """Put a tier under its cap.

        Args:
            tier: any; only one on disk has a cap, others keep to their own.
            index: folder in which the order of eviction survives a restart.
            owned: says whether an object belongs to the store's namespace.
            on_evicted: is told the tier and the name of what had to leave.
            on_fault: receives the reason where the file of the order cannot be used.

        Returns:
            The tier, bounded.
        """
        on_disk = index is not None and tier.is_local
        return BoundedTier(
            tier,
            self.disk_bytes if on_disk else None,
            plugins.load("store.eviction", self.eviction)(),
            spare_bytes=_spare_bytes(index) if on_disk and index and self.disk_bytes is None else None,
            order=index / f"{tier.name}.{self.eviction}.order" if on_disk and index else None,
            owned=owned,
            quota_bytes=self.quota_bytes,
            on_evicted=lambda name, _: on_evicted(tier.name, name),
            on_fault=on_fault,
        )

    def bound_blocks(
        self, tier: Tier, folder: Path | None, owned: Callable[[str], bool], on_evicted: Callable[[str, int], None]
    ) -> BoundedTier:
        """Put the tier that keeps chunks in blocks under a cap of its own.

        Args:
            tier: on disk or in memory.
            folder: of the tier on disk; None for memory, where the cap is that of memory.
            owned: as in `bound`.
            on_evicted: receives the name and the size of what had to leave.

        Returns:
            The tier, bounded.
        """
        memory_bytes = default_memory_bytes() if self.memory_bytes is None else self.memory_bytes
        return BoundedTier(
            tier,
            self.disk_bytes if folder else memory_bytes,
            plugins.load("store.eviction", self.eviction)(),
            spare_bytes=_spare_bytes(folder / "index") if folder and self.disk_bytes is None else None,
            order=folder / "index" / f"{tier.name}.{self.eviction}.order" if folder else None,
            owned=owned,
            quota_bytes=self.quota_bytes,
            on_evicted=on_evicted,
        )


def _spare_bytes(index: Path) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(index.parent).free // 2
    return None
