# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sequence operations against a plain list of (token, position) for each sequence, and against what llama.h says."""

from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend.context.token_table import TokenTable
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


# llama.h: eight tokens are in sequence 0, each at its own position


def cases():
    """Of each line of llama_h.txt: its operations, and the token and position of each cell of each sequence behind."""
    for line in Path(__file__).with_name("llama_h.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        said, _, held = line.partition(" ->")
        operations = []
        for operation in said.split("; "):
            name, *numbers = operation.split()
            operations.append((name, *map(int, numbers)))
        rows = {}
        for row in filter(None, held.split(";")):
            sequence, _, cells = row.partition(":")
            rows[int(sequence)] = [cell.split("@") for cell in cells.split()]
        yield pytest.param(operations, rows, id=said)


@pytest.mark.parametrize(("operations", "expected"), [*cases()])
def test_operation_of_llama_cpp_moves_tokens_and_keys_as_llama_h_says(operations, expected):
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
        tokens, positions = torch.tensor([(int(cell[0]), int(cell[-1])) for cell in row]).T
        assert cache.tokens(number) == [ids[token] for token in tokens]
        assert cache.positions(number) == positions.tolist()
        cache.use(number)
        for layer, other in zip(cache.compact(), stock.layers, strict=True):
            keys = rotated(other.keys[:, :, tokens], positions - tokens)
            assert apart(layer.keys, keys) <= 2e-6
            assert torch.equal(layer.values, other.values[:, :, tokens])
