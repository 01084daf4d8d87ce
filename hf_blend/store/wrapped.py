# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A tier in front of a tier: passes on all that a subclass does not change."""

from collections.abc import Iterator, Sequence

from .tiers.base import ObjectStat, Source, Tier

__all__ = ["WrappedTier"]


class WrappedTier(Tier):
    """Does what the tier behind does."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.name = tier.name
        self.is_local = tier.is_local

    @property
    def is_healthy(self) -> bool:
        """As the tier behind."""
        return self.tier.is_healthy

    def open(self, name: str) -> Source | None:
        """As the tier behind."""
        return self.tier.open(name)

    def put_if_absent(self, name: str, parts: Sequence[memoryview]) -> bool:
        """As the tier behind."""
        return self.tier.put_if_absent(name, parts)

    def replace(self, name: str, parts: Sequence[memoryview]) -> None:
        """As the tier behind."""
        self.tier.replace(name, parts)

    def delete(self, name: str, source: Source | None = None) -> bool:
        """As the tier behind."""
        return self.tier.delete(name, source)

    def names(self, space: str) -> frozenset[str]:
        """As the tier behind."""
        return self.tier.names(space)

    def stat(self, name: str) -> ObjectStat | None:
        """As the tier behind."""
        return self.tier.stat(name)

    def contains(self, name: str) -> bool:
        """As the tier behind."""
        return self.tier.contains(name)

    def listing(self) -> Iterator[tuple[str, ObjectStat]]:
        """As the tier behind."""
        return self.tier.listing()

    def set_pin(self, name: str, pinned: bool) -> None:
        """As the tier behind."""
        self.tier.set_pin(name, pinned)

    def pins(self) -> frozenset[str]:
        """As the tier behind."""
        return self.tier.pins()

    def remove_orphans(self) -> int:
        """As the tier behind."""
        return self.tier.remove_orphans()

    def close(self) -> None:
        """As the tier behind."""
        self.tier.close()
