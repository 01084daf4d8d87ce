# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that depart from a cache: what both have is found."""

from difflib import SequenceMatcher

from hypothesis import given
from hypothesis import strategies as st

from hf_blend.cache import edits
from hf_blend.cache.edits import Run, common_runs
from tests.conftest import random_ids

IDS = st.lists(st.integers(0, 2), max_size=40)


def windows(ids, width):
    return [tuple(ids[start : start + width]) for start in range(len(ids) - width + 1)]


@given(IDS, IDS, st.integers(1, 5))
def test_runs_are_common_whole_and_cover_every_shared_window(held, prompt, least):
    runs = common_runs(held, prompt, least)
    shared = {*windows(held, least)}
    stop = 0
    for run in runs:
        assert run.start >= stop
        assert run.tokens >= least
        assert held[run.held : run.held + run.tokens] == prompt[run.start : run.start + run.tokens]
        stop = run.start + run.tokens
        assert held[run.held + run.tokens :][:1] != prompt[stop:][:1] or stop == len(prompt)
    covered = {position for run in runs for position in range(run.start, run.start + run.tokens)}
    for start, window in enumerate(windows(prompt, least)):
        assert window not in shared or start in covered


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=60), st.data())
def test_runs_are_those_of_difflib_where_ids_are_unique(held, data):
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 60), st.integers(0, 60))))
    prompt = [*held[:start], -1, *held[stop:]]
    blocks = SequenceMatcher(None, held, prompt, autojunk=False).get_matching_blocks()
    expected = [Run(block.b, block.a, block.size) for block in blocks if block.size >= 4]
    assert common_runs(held, prompt, 4) == expected


def test_run_may_come_from_behind_and_repeats_continue_the_run_before():
    first, second = random_ids(40, 1), random_ids(40, 2)
    held = [*first, *second, *first]
    assert common_runs(held, [*second, *first, 0, *first]) == [Run(0, 40, 80), Run(81, 0, 40)]
    assert common_runs(held, first[:32]) == common_runs([], held) == []


def test_equal_hashes_are_not_equal_ids(monkeypatch):
    held, prompt = random_ids(100, 1), random_ids(100, 2)
    prompt[50:90] = held[10:50]
    monkeypatch.setattr(edits, "_hashes", lambda ids, width: edits.np.zeros(len(ids) - width + 1, "uint64"))
    monkeypatch.setattr(edits, "_MOST_ALIKE", 100)
    assert common_runs(held, prompt) == [Run(50, 10, 40)]


def test_text_that_repeats_itself_compares_few_positions(monkeypatch):
    calls = []
    agreement = edits._agreement
    monkeypatch.setattr(edits, "_agreement", lambda *pair: calls.append(1) or agreement(*pair))
    assert len(common_runs([7] * 3000, [*[7] * 40, 8] * 70)) == 70
    assert len(calls) <= edits._MOST_ALIKE * 70
