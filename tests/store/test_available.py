# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Memory that is planned with is the container's, not the machine's."""

import psutil
import pytest

from hf_blend.store.memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def process(monkeypatch):
    """The machine has 64 GiB left, and this process holds 1."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 64 * GIB}))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: type("M", (), {"rss": GIB}))


def groups(folder, own, **limits):
    (folder / "own").write_text(own)
    for path, limit in limits.items():
        file = folder / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return available_bytes(folder, folder / "own") // GIB


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"memory.max": 8 * GIB}, 7),
        ("0::/\n", {"memory.max": "max"}, 64),
        ("0::/a/b\n", {"a__b__memory.max": "max", "a__memory.max": 4 * GIB, "memory.max": 16 * GIB}, 3),
        ("0::/a\n", {"a__memory.max": GIB // 2}, 0),
        ("5:cpu:/x\n4:memory:/docker/1\n0::/\n", {"memory__memory.limit_in_bytes": 8 * GIB}, 7),
        ("4:memory,hugetlb:/d\n", {"memory__d__memory.limit_in_bytes": 2 * GIB}, 1),
        ("4:memory:/\n", {"memory__memory.limit_in_bytes": 9223372036854771712}, 64),
        ("0::/../..\n", {"memory.max": 8 * GIB}, 7),
        ("what\n", {}, 64),
    ],
)
def test_the_smallest_limit_of_all_groups_holds(own, limits, expected, tmp_path, process):
    assert groups(tmp_path, own, **limits) == expected


def test_where_there_are_no_groups_the_machine_holds(tmp_path, process):
    assert available_bytes(tmp_path, tmp_path / "absent") == 64 * GIB
