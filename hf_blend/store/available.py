# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may still take, also inside a container."""

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_bytes"]

FILES = {"": ("", "memory.max"), "memory": ("memory", "memory.limit_in_bytes")}  # by controller: cgroup v2, v1


def available_bytes(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """What the machine has left, or less: what the container or unit leaves to this process."""
    import psutil

    taken = psutil.Process().memory_info().rss
    left = [limit - taken for limit in _limits(groups, own)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """The limits of the groups of this process and of those around them."""
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        return  # no Linux
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        for folder, file in [FILES[one] for one in controllers.split(",") if one in FILES]:
            at = groups / folder / path.strip("/")
            for place in (at, *at.parents):
                text = _text(place / file) if place.is_relative_to(groups) else ""
                if text.isdecimal():
                    yield int(text)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""
