# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""No room grows unseen: lines of Python are counted by room. Lower a number where lines went.

A number is raised only by the change that brings a new capability into that room, and its message says which.
"""

import lines
import pytest

MOST = {
    "top": 1_264,
    "cache": 1_984,
    "context": 3_155,
    "correctors": 182,
    "hybrids": 904,
    "images": 666,
    "integrations": 1_737,
    "loading": 467,
    "model": 4_232,
    "offload": 911,
    "prefill": 2_661,
    "prompt": 703,
    "rotary": 338,
    "selectors": 729,
    "serving": 4_042,
    "sparse": 2_278,
    "store": 6_010,
    "training": 302,
    "verify": 1_361,
    "cli": 2_432,
    "evaluation": 5_222,
    "tests": 32_383,
}


@pytest.mark.parametrize("room", [*lines.by_room(), "tests"])
def test_lines_of_a_room_do_not_grow(room):
    found = {**lines.by_room(), **lines.totals()}[room]
    assert found <= MOST.get(room, 0), f"{room} has {found:,} lines; `python benchmarks/lines.py` shows all rooms"
