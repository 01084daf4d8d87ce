# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""No room grows unseen: lines of Python are counted by room. Lower a number where lines went.

A number is raised only by the change that brings a new capability into that room, and its message says which.
"""

import lines
import pytest

MOST = {
    "top": 1_539,
    "cache": 2_781,
    "context": 3_255,
    "correctors": 171,
    "far tiers": 628,
    "hybrids": 984,
    "integrations": 2_158,
    "loading": 453,
    "model": 3_999,
    "offload": 881,
    "prefill": 2_755,
    "prompt": 984,
    "rotary": 356,
    "selectors": 730,
    "sparse": 2_170,
    "store": 5_329,
    "verify": 1_353,
    "cli": 2_722,
    "evaluation": 6_670,
    "tests": 38_391,
}


@pytest.mark.parametrize("room", [*lines.by_room(), "tests"])
def test_lines_of_a_room_do_not_grow(room):
    found = {**lines.by_room(), **lines.totals()}[room]
    assert found <= MOST.get(room, 0), f"{room} has {found:,} lines; `python benchmarks/lines.py` shows all rooms"


def test_promises_name_files_that_are_there_and_what_they_hold_once():
    named = [path for held in lines.PROMISES.values() for paths in held.values() for path in paths]
    assert len(named) == len(set(named))
    assert [path for path in named if not lines.promised_lines((path,))] == []


def test_promises_hold_the_lines_of_every_room_that_has_more_than_it_should():
    found, most = lines.by_room(), {**lines.CORE, **lines.ROOMS}
    over = {name: found[name] - count for name, count in most.items() if found[name] > 1.1 * count}
    held = {name: sum(map(lines.promised_lines, lines.PROMISES.get(name, {}).values())) for name in over}
    assert {name: (count, held[name]) for name, count in over.items() if held[name] < count} == {}
