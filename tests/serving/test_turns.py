# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose turn is next, and how long it may be."""

import pytest

from hf_blend.serving.turns import Rounds, Share


def test_who_comes_is_served_before_who_was_served_last_and_behind_who_waits():
    rounds = Rounds()
    assert rounds.order(["a1", "b1"], lambda one: one[0]) == ["a1", "b1"]
    rounds.serve("a")
    assert rounds.order(["a2", "c1", "b1", "a3", "b2"], lambda one: one[0]) == ["b1", "c1", "a2", "b2", "a3"]


@pytest.mark.parametrize("waiting", [["a", "b"], ["a", "b", "c"]])
def test_whoever_waits_is_served_before_another_is_served_twice(waiting):
    rounds, served = Rounds(), []
    for number in range(60):
        come = [*waiting, "new"] if number % 3 else [*waiting, f"stranger {number}"]
        served.append(rounds.order([(who, n) for who in come for n in range(5)], lambda one: one[0])[0])
        rounds.serve(served[-1][0])
    assert {n for _, n in served} == {0}, "a tenant's own in their order"
    for start in range(60 - 2 * len(waiting) - 2):
        assert {who for who, _ in served[start : start + 2 * len(waiting) + 2]} >= {*waiting}
    assert len(rounds._line) + len(rounds._served) <= len(waiting) + 2, "who is gone is forgotten"


@pytest.mark.parametrize(
    ("layer_s", "stall_s", "turns"), [(10.0, None, 40), (0.25, None, 100), (10.0, 0.05, 100)],
    ids=["a layer is longer than a turn", "layers are shorter", "as long as is said"],
)  # fmt: skip
def test_a_blend_takes_no_more_than_its_share_of_the_time_of_those_that_decode(layer_s, stall_s, turns):
    share, given, took = Share(stall_s), 0, 0.0
    for _ in range(100):
        seconds, turn_s = share.turn_s(is_decoding=True), 0.0
        if seconds >= 0:
            given, turn_s = given + 1, layer_s * max(1, seconds // layer_s)
        share.note(turn_s, 1.0, is_decoding=True)
        took += turn_s
    assert given == turns
    assert stall_s is not None or took <= 100 * 4 + layer_s
    assert share.turn_s(is_decoding=False) == 0.1
