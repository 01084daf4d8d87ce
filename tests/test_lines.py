# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""No room grows unseen: lines of Python are counted by room. Lower a number where lines went.

A number is raised only by the change that brings a new capability into that room, and its message says which.
"""

import lines
import pytest

MOST = {
    "top": 1_218,
    "cache": 1_980,
    "context": 3_155,
    "correctors": 171,
    "far tiers": 591,
    "hybrids": 904,
    "images": 651,
    "integrations": 1_671,
    "loading": 453,
    "model": 4_109,
    "offload": 869,
    "prefill": 2_474,
    "prompt": 687,
    "rotary": 319,
    "selectors": 660,
    "serving": 3_973,
    "sparse": 2_173,
    "store": 5_300,
    "training": 299,
    "verify": 1_353,
    "cli": 2_389,
    "evaluation": 5_138,
    "tests": 31_597,
}


@pytest.mark.parametrize("room", [*lines.by_room(), "tests"])
def test_lines_of_a_room_do_not_grow(room):
    found = {**lines.by_room(), **lines.totals()}[room]
    assert found <= MOST.get(room, 0), f"{room} has {found:,} lines; `python benchmarks/lines.py` shows all rooms"
