# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence operations against a plain list of (token, position) for each sequence, and against what llama.h says."""

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend.context.token_table import TokenTable
from hf_blend.errors import ConfigError
from tests.asking import apart, rotated
from tests.sequences import filled as filled_cache

SEQUENCES = st.integers(0, 3)
PLACES = st.integers(-1, 24)
STOPS = st.none() | PLACES
ARGUMENTS = {
    "append": (SEQUENCES, st.integers(1, 6)),
    "remove": (st.just(-1) | SEQUENCES, PLACES, STOPS),
    "copy": (SEQUENCES, SEQUENCES, PLACES, STOPS),
    "keep": (SEQUENCES,),
    "shift": (SEQUENCES, PLACES, STOPS, st.integers(-9, 9)),
    "divide": (SEQUENCES, PLACES, STOPS, st.integers(1, 4)),
    "crop": (SEQUENCES, st.integers(0, 4)),
    "compact": (),
}
OPERATION = st.sampled_from([*ARGUMENTS]).flatmap(lambda name: st.tuples(st.just(name), *ARGUMENTS[name]))


def moves(tokens, *more):
    """Programs of what can be done with a cache whose sequence 0 has so many tokens."""
    only = st.just(0)
    place = st.integers(0, tokens)
    remove = st.tuples(st.just("remove"), only, place, st.integers(0, 3 * tokens // 2))
    shift = st.tuples(st.just("shift"), only, place, st.none(), st.integers(-20, 30))
    divide = st.tuples(st.just("divide"), only, place, st.none(), st.integers(1, 3))
    copy = st.tuples(st.just("copy"), only, st.just(1))
    return st.lists(st.one_of(remove, shift, divide, copy, *more), max_size=6)


class Lists:
    """The same operations, one token at a time."""

    def __init__(self):
        self.rows = {}
        self._names = count()

    def row(self, sequence):
        return self.rows.setdefault(sequence, [])

    def append(self, sequence, tokens):
        start = max((position for _, position in self.row(sequence)), default=-1) + 1
        added = [(next(self._names), start + place) for place in range(tokens)]
        self.row(sequence).extend(added)
        return added

    def remove(self, sequence, start=0, stop=None):
        sequences = list(self.rows) if sequence == -1 else [sequence]
        for number in sequences:
            self.rows[number] = [pair for pair in self.row(number) if not inside(pair[1], start, stop)]

    def copy(self, source, target, start=0, stop=None):
        copied = self.row(target)
        there = {token for token, _ in copied}
        for token, position in list(self.row(source)):
            if inside(position, start, stop) and token not in there:
                copied.append((token, position))

    def keep(self, sequence):
        self.rows = {sequence: self.row(sequence)}

    def shift(self, sequence, start, stop, delta):
        shifted = []
        for token, position in self.row(sequence):
            if inside(position, start, stop):
                position += delta
            if position >= 0:
                shifted.append((token, position))
        self.rows[sequence] = shifted

    def divide(self, sequence, start, stop, by):
        divided = []
        for token, position in self.row(sequence):
            if inside(position, start, stop):
                position //= by
            divided.append((token, position))
        self.rows[sequence] = divided

    def crop(self, sequence, tokens):
        row = self.row(sequence)
        self.rows[sequence] = row[: max(0, len(row) - tokens)]


def inside(position, start, stop):
    return position >= start and (stop in (None, -1) or position < stop)


def append(table, sequence, added):
    """Give a sequence tokens (id, position), whose ids are their names."""
    ids, positions = torch.tensor(added).T
    table.write(sequence, positions, ids)


def filled(tokens):
    table = TokenTable()
    append(table, 0, [(token, token) for token in range(tokens)])
    return table


def run(program):
    """Run a program on both, and compare what each sequence holds after each step."""
    table = TokenTable()
    plain = Lists()
    for name, *arguments in program:
        if name == "append":
            append(table, arguments[0], plain.append(*arguments))
        elif name == "compact":
            table.compact()
            assert table.compact() is None
        else:
            getattr(plain, name)(*arguments)
            getattr(table, name)(*arguments)
        for sequence in range(4):
            row = plain.row(sequence)
            cells, positions = table.row(sequence)
            assert list(zip(table.ids[cells].tolist(), positions.tolist(), strict=True)) == row
            last = max((position for _, position in row), default=-1)
            assert table.next_position(sequence) == last + 1


@given(st.lists(OPERATION, max_size=25))
def test_any_program_gives_what_plain_list_gives(program):
    run(program)


def test_after_compaction_storage_has_no_hole():
    table = filled(10)
    table.copy(0, 1, 6)
    table.remove(0, 2, 8)
    assert table.compact().tolist() == table.ids.tolist() == table.origins.tolist() == [0, 1, 6, 7, 8, 9]
    assert table.row(1)[0].tolist() == [2, 3, 4, 5]


# llama.h: eight tokens are in sequence 0; a case is the operations, and (token, position) of each sequence behind them


def held(*tokens, by=0):
    """Some tokens, each moved by a distance from where it was computed."""
    return [(token, token + by) for token in tokens]


ALL = range(8)
SHARED = ("copy", 0, 1)
LLAMA_H = {
    # llama_memory_seq_rm
    "rm range": ([("remove", 0, 2, 5)], {0: held(0, 1, 5, 6, 7)}),
    "rm p0 below 0": ([("remove", 0, -1, 3)], {0: held(*ALL[3:])}),
    "rm p1 below 0": ([("remove", 0, 5, -1)], {0: held(*ALL[:5])}),
    "rm both below 0": ([("remove", 0, -1, -1)], {}),
    "rm any sequence": ([SHARED, ("remove", -1, 2, 6)], {0: held(0, 1, 6, 7), 1: held(0, 1, 6, 7)}),
    "rm everything": ([SHARED, ("remove", -1, -1, -1)], {}),
    "rm empty range": ([("remove", 0, 3, 3)], {0: held(*ALL)}),
    "rm reversed range": ([("remove", 0, 5, 3)], {0: held(*ALL)}),
    "rm beyond the end": ([("remove", 0, 8, 20)], {0: held(*ALL)}),
    "rm of one that shares": ([SHARED, ("remove", 0, 2, 5)], {0: held(0, 1, 5, 6, 7), 1: held(*ALL)}),
    "rm of one that is not": ([("remove", 7, -1, -1)], {0: held(*ALL)}),
    "rm by new positions": ([("shift", 0, 4, -1, 9), ("remove", 0, 13, 15)], {0: [*held(*ALL[:4]), (6, 15), (7, 16)]}),
    # llama_memory_seq_cp
    "cp": ([SHARED], {0: held(*ALL), 1: held(*ALL)}),
    "cp range": ([("copy", 0, 1, 2, 5)], {0: held(*ALL), 1: held(2, 3, 4)}),
    "cp p0 below 0": ([("copy", 0, 1, -1, 3)], {0: held(*ALL), 1: held(0, 1, 2)}),
    "cp p1 below 0": ([("copy", 0, 1, 6, -1)], {0: held(*ALL), 1: held(6, 7)}),
    "cp to itself": ([("copy", 0, 0, -1, -1)], {0: held(*ALL)}),
    "cp twice": ([SHARED, SHARED], {0: held(*ALL), 1: held(*ALL)}),
    "cp joins": ([("copy", 0, 1, 0, 2), ("copy", 0, 1, 5, 7)], {0: held(*ALL), 1: held(0, 1, 5, 6)}),
    "cp of one that is not": ([("copy", 8, 6)], {0: held(*ALL)}),
    "cp of nothing": ([("copy", 0, 6, 3, 3)], {0: held(*ALL)}),
    "cp outlives its source": ([SHARED, ("remove", 0, -1, -1)], {1: held(*ALL)}),
    # llama_memory_seq_keep
    "keep": ([("copy", 0, 1, 0, 3), ("keep", 1)], {1: held(0, 1, 2)}),
    "keep of the only one": ([("keep", 0)], {0: held(*ALL)}),
    "keep of one that is not": ([("keep", 5)], {}),
    # llama_memory_seq_add; unlike there, a shared token moves for one sequence only
    "add": ([("shift", 0, 4, 6, 10)], {0: [*held(*ALL[:4]), *held(4, 5, by=10), *held(6, 7)]}),
    "add p0 below 0": ([("shift", 0, -1, 2, 20)], {0: [*held(0, 1, by=20), *held(*ALL[2:])]}),
    "add p1 below 0": ([("shift", 0, 5, -1, 7)], {0: [*held(*ALL[:5]), *held(5, 6, 7, by=7)]}),
    "add whole": ([("shift", 0, -1, -1, 100)], {0: held(*ALL, by=100)}),
    "add 0": ([("shift", 0, 2, 6, 0)], {0: held(*ALL)}),
    "add empty range": ([("shift", 0, 4, 4, 3)], {0: held(*ALL)}),
    "add below position 0": ([("shift", 0, -1, -1, -3)], {0: held(*ALL[3:], by=-3)}),
    "add there and back": ([("shift", 0, -1, -1, 9), ("shift", 0, -1, -1, -9)], {0: held(*ALL)}),
    "add of one that shares": ([SHARED, ("shift", 1, -1, -1, 4)], {0: held(*ALL), 1: held(*ALL, by=4)}),
    "add of one that is not": ([("shift", 8, -1, -1, 4)], {0: held(*ALL)}),
    "add closes a hole": ([("remove", 0, 2, 5), ("shift", 0, 5, -1, -3)], {0: [*held(0, 1), *held(5, 6, 7, by=-3)]}),
    # llama_memory_seq_div
    "div": ([("divide", 0, -1, -1, 2)], {0: [(token, token // 2) for token in ALL]}),
    "div range": ([("divide", 0, 4, 8, 4)], {0: [*held(*ALL[:4]), (4, 1), (5, 1), (6, 1), (7, 1)]}),
    "div p1 below 0": ([("divide", 0, 6, -1, 3)], {0: [*held(*ALL[:6]), (6, 2), (7, 2)]}),
    "div by 1": ([("divide", 0, -1, -1, 1)], {0: held(*ALL)}),
    "div of one that is not": ([("divide", 9, -1, -1, 2)], {0: held(*ALL)}),
    # llama_memory_clear
    "clear": ([SHARED, ("reset",)], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", LLAMA_H)
def test_operation_of_llama_cpp_moves_tokens_and_keys_as_llama_h_says(case):
    operations, expected = LLAMA_H[case]
    model = tiny_model("llama")
    cache = filled_cache(model, 8)
    ids = cache.tokens()
    stock = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=stock)
    for name, *arguments in operations:
        getattr(cache, name)(*arguments)

    assert cache.sequences == sorted(expected)
    for number, row in expected.items():
        tokens, positions = torch.tensor(row).T
        assert cache.tokens(number) == [ids[token] for token in tokens]
        assert cache.positions(number) == positions.tolist()
        cache.use(number)
        for layer, other in zip(cache.compact(), stock.layers, strict=True):
            keys = rotated(other.keys[:, :, tokens], positions - tokens)
            assert apart(layer.keys, keys) <= 2e-6
            assert torch.equal(layer.values, other.values[:, :, tokens])


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("divide", (0, 0, None, 0), "by is 0"),
        ("divide", (0, 0, None, -2), "by is -2"),
        ("divide", (0, 0, None, 2.5), "by is 2.5"),
        ("shift", (0, 0, None, 0.5), "delta is 0.5"),
        ("shift", (0, 0, None, True), "delta is True"),
        ("shift", (0, 0.5, None, 1), "start is 0.5"),
        ("remove", (0, 0, 2.0), "stop is 2.0"),
        ("remove", (-2,), "number of a sequence is -2"),
        ("remove", (None,), "number of a sequence is None"),
        ("copy", (-1, 0), "number of a sequence is -1"),
    ],
)
def test_argument_that_is_no_whole_number_in_range_is_refused(name, arguments, said):
    cache = filled_cache(tiny_model("llama"), 8)
    with pytest.raises(ConfigError, match=f"{said}, expected a whole number"):
        getattr(cache, name)(*arguments)
    assert cache.positions() == list(ALL)
