# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Identifiers that say nothing are counted by room, and a count only falls: lower it when names become better."""

import ast
from collections import Counter
from functools import cache

import pytest

from tests.source import PACKAGE, ROOT, nodes_of

EMPTY = {"asked", "found", "given", "held", "known", "one", "part", "shown", "wanted"}

MOST = {
    "cache": 7,
    "context": 1,
    "evaluation": 4,
    "model": 1,
    "prefill": 1,
    "prompt": 2,
}


def identifiers(nodes):
    """Every name that is read, set, taken as a parameter, passed as a keyword or looked up as an attribute."""
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.keyword(arg=name) | ast.Attribute(attr=name):
                yield name


def room_of(path):
    top, *below = path.relative_to(ROOT).parts
    return below[0] if top == "hf_blend" and len(below) > 1 else top


@cache
def counts():
    by_room = Counter()
    for path in PACKAGE:
        by_room[room_of(path)] += sum(name in EMPTY for name in identifiers(nodes_of(path)))
    return by_room


@pytest.mark.parametrize("room", sorted(MOST.keys() | {room_of(path) for path in PACKAGE}))
def test_names_that_say_nothing_only_become_fewer(room):
    assert counts()[room] <= MOST.get(room, 0), "name these by what they hold: a chunk, a span, a layer, a row, a key"


def test_every_kind_of_identifier_is_counted():
    tree = ast.parse("def f(one, *found, **given): held = part.known(asked=shown)")
    assert EMPTY.intersection(identifiers(ast.walk(tree))) == EMPTY - {"wanted"}
