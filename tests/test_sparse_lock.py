# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The lock's state machine against a plain model of its description, over random programs."""

from hypothesis import given
from hypothesis import strategies as st

from hf_blend.sparse.config import SparseConfig
from hf_blend.sparse.layout import Layout
from hf_blend.sparse.lock import LockMetrics, Selection, SelectionLock

SIZE = 4
BLOCKS = st.sets(st.integers(0, 9), min_size=3, max_size=3).map(lambda some: tuple(sorted(some)))
PROGRAMS = st.lists(st.one_of(st.just("unlock"), st.tuples(BLOCKS, st.integers(1, 5))), max_size=60)
CONFIGS = st.builds(
    SparseConfig,
    block_tokens=st.just(SIZE),
    lock=st.booleans(),
    checkpoint_interval=st.integers(1, 9),
    update_threshold=st.integers(0, 4),
    lock_duration=st.integers(1, 20),
)


class Described:
    """What the description says, written down step by step."""

    def __init__(self, config: SparseConfig) -> None:
        self.config, self.blocks, self.age, self.unchecked = config, None, 0, 0
        self.counts = dict.fromkeys(("locks", "unlocks", "kept", "changed"), 0)

    def unlock(self) -> None:
        self.counts["unlocks"] += self.blocks is not None
        self.blocks = None

    def get(self, new: tuple[int, ...], steps: int) -> tuple[int, ...]:
        if self.blocks is not None and (not self.config.lock or self.age >= self.config.lock_duration):
            self.unlock()
        if self.blocks is None:
            self.counts["locks"] += 1
            self.blocks, self.age, self.unchecked = new, 0, 0
        elif self.unchecked >= self.config.checkpoint_interval:
            added, removed = set(new) - set(self.blocks), set(self.blocks) - set(new)
            self.unchecked = 0
            if len(added) + len(removed) <= self.config.update_threshold:
                self.counts["kept"] += 1
            else:
                self.counts["changed"] += 1
                self.blocks, self.age = new, 0
        self.age, self.unchecked = self.age + steps, self.unchecked + steps
        return self.blocks


@given(CONFIGS, PROGRAMS)
def test_a_lock_does_what_is_described(config, program):
    metrics = LockMetrics()
    lock, plain = SelectionLock(config, metrics), Described(config)
    for one in program:
        if one == "unlock":
            lock.unlock()
            plain.unlock()
            assert not lock.is_locked
            continue
        asked: list[int] = []
        due = lock.is_due
        got = lock.get(lambda one=one, asked=asked: asked.append(1) or Selection(one[0], 40), one[1])
        assert got.blocks == plain.get(*one)
        assert bool(asked) == due, "a selection is made only when it is needed"
    assert {name: getattr(metrics, name) for name in plain.counts} == plain.counts
    assert 0 <= metrics.update_rate <= 1


def test_only_blocks_that_both_selections_could_choose_are_compared():
    older, newer = Selection((0, 3, 8, 9), 40), Selection((0, 4, 10, 11), 48)
    assert older.differences(newer, SIZE) == 4  # 3, 8, 9 and 4: blocks 10 and 11 were in the older one's tail
    assert newer.differences(older, SIZE) == 4


REQUESTS = st.lists(st.tuples(st.sets(st.integers(0, 9)), st.integers(10, 13)), min_size=1, max_size=4)


@given(REQUESTS, st.integers(52, 70))
def test_a_layout_shows_each_request_its_blocks_and_its_tail_once(requests, total):
    selections = []
    for some, tail in requests:
        selections.append(Selection(tuple(sorted(some | set(range(10, tail)) - {11})), tail * SIZE))
    layout = Layout(selections, SIZE)
    columns, seen = layout.columns(total), layout.seen(total)
    for row, one in enumerate(selections):
        inside = [block * SIZE + place for block in one.blocks for place in range(SIZE)]
        shown = columns[row] if seen is None else columns[row][seen[row]]
        assert sorted(shown.tolist()) == sorted([*inside, *range(one.tail, total)])
