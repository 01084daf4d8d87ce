# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A sequence cache in 8 or 4 bits: every token is quantised once, as it was computed, whatever is done with it."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import DynamicCache

from hf_blend import ConfigError, SequenceCache, StoreError
from hf_blend.context.session import load_session, save_session
from tests import sequences
from tests.asking import packed_by_hand, prompt, rotated
from tests.sequences import fed
from tests.test_sequence_ops import Lists, moves
from tests.test_session import bits_of, check_refused, same

MODEL = tiny_model("llama", max_position_embeddings=4096)
GROUP = 32
FLOOR = 2e-6  # of the largest logit; measured: 0 where nothing moved, up to 6e-7 where keys were turned
FLIP = {8: 2e-4, 4: 3e-3}  # one value rounded the other way: up to 8e-5 and 1.3e-3; all quantised: 2.4e-3 and 2.5e-2


def filled(tokens=150, bits=8, model=MODEL):
    return sequences.filled(model, tokens, kv_bits=bits)


class Plain(Lists):
    """The same in plain torch around stock forwards with stock caches, one sequence after the other."""

    def __init__(self, model, bits):
        super().__init__()
        self.model = model
        self.bits = bits
        self.kv = None  # K and V of each layer by cell; `rows` are of pairs (cell, position)
        self.packed = 0
        self.origins = []

    def shown(self, number):
        cells, positions = torch.tensor(self.row(number), dtype=torch.long).view(-1, 2).T
        by = positions - torch.tensor(self.origins, dtype=torch.long)[cells]
        kv = [(k[:, :, cells], v[:, :, cells]) for k, v in self.kv or ()]
        return [(rotated(k, by).float() if by.any() else k, v) for k, v in kv]

    @torch.no_grad()
    def forward(self, ids, batch=(0,)):
        found = []
        for number, line in zip(batch, ids, strict=True):
            cache = DynamicCache()
            row = self.row(number)
            for index, pair in enumerate(self.shown(number)):
                cache.update(*pair, index)
            first = max((at for _, at in row), default=-1) + 1
            at = torch.arange(first, first + len(line))
            mask = torch.ones((1, len(row) + len(line)), dtype=torch.long)
            logits = self.model(line[None], past_key_values=cache, position_ids=at[None], attention_mask=mask).logits
            new = [(one.keys[:, :, -len(line) :], one.values[:, :, -len(line) :]) for one in cache.layers]
            found.append((logits, new, at.tolist()))
        for number, (_, layers, at) in zip(batch, found, strict=True):
            self.row(number).extend(zip(range(len(self.origins), len(self.origins) + len(at)), at, strict=True))
            self.origins += at
            pairs = zip(self.kv, layers, strict=True) if self.kv else [(one,) for one in layers]
            self.kv = [tuple(torch.cat(two, 2) for two in zip(*pair, strict=True)) for pair in pairs]
        self.pack(len(batch))
        return torch.cat([logits for logits, _, _ in found])

    def pack(self, sequences):
        end = self.packed + max(0, (len(self.origins) - self.packed) // GROUP - sequences) * GROUP
        for pair in self.kv if end > self.packed else ():
            new = packed_by_hand(*(part[:, :, self.packed :] for part in pair), self.bits, end - self.packed)
            for states, part in zip(pair, new, strict=True):
                states[:, :, self.packed :] = part
        self.packed = end

    def close(self):
        """Cells of no sequence are given back."""
        kept = sorted({cell for row in self.rows.values() for cell, _ in row})
        self.packed = sum(cell < self.packed for cell in kept)
        self.origins = [self.origins[cell] for cell in kept]
        self.kv = [tuple(part[:, :, kept] for part in pair) for pair in self.kv]
        self.rows = {number: [(kept.index(cell), at) for cell, at in row] for number, row in self.rows.items()}


def both(tokens=150, bits=8, model=MODEL):
    plain = Plain(model, bits)
    plain.forward(prompt(tokens))
    return filled(tokens, bits, model), plain


def goes_on_alike(cache, plain, steps=24, seed=1, size=1, within=FLOOR):
    """Feed both the same tokens, `size` in each forward, and compare the logits of each."""
    for step in range(steps):
        ids = prompt(size, seed + step, len(cache.batch))
        got = fed(cache, ids)
        expected = plain.forward(ids, cache.batch)
        assert float((got - expected).abs().max() / expected.abs().max()) <= within, step


def shows(cache, plain, number=0):
    """K and V of a sequence are those of a plain one, bit for bit."""
    for layer, pair in zip(cache.materialize(), plain.shown(number), strict=True):
        assert torch.equal(layer.keys, pair[0])
        assert torch.equal(layer.values, pair[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_tokens_quantised_by_formula(bits):
    cache, plain = both(bits=bits)
    exact = Plain(MODEL, bits)
    exact.pack = lambda sequences: None
    exact.forward(prompt(150))
    ids = prompt(1, 9)
    apart = (copy.deepcopy(plain).forward(ids) - exact.forward(ids)).abs().max()
    assert apart > 100 * FLOOR, "what is quantised can be seen"
    goes_on_alike(cache, plain)


@pytest.mark.parametrize("bits", [8, 4])
def test_moved_keys_are_rotated_from_what_was_quantised(bits):
    cache, plain = both(bits=bits)
    for start, stop, moved in ((40, 71, 0), (510, 516, 500)):
        for one in (cache, plain):
            one.shift(0, 0, None, moved)
            one.remove(0, start, stop)
            one.shift(0, stop, None, start - stop)
        plain.close()
        goes_on_alike(cache, plain, steps=15, size=2, within=FLIP[bits])


@pytest.mark.parametrize("bits", [8])
def test_forks_write_to_no_shared_cell(bits):
    cache, plain = both(bits=bits)
    before = bits_of(cache, 0)
    packed = len(before["layer.0.groups"])
    numbers = cache.fork(3)
    for number in numbers[1:]:
        plain.copy(0, number)
    goes_on_alike(cache, plain, steps=14, size=2)
    after = bits_of(cache)
    for name in (name for name in before if "bytes" in name or name.startswith("layer.0.v.scale")):
        assert torch.equal(after[name][:, :packed], before[name])
    cache.use(1)
    goes_on_alike(cache, plain, steps=3)


CROP = st.tuples(st.just("crop"), st.integers(-90, 0))
FORWARD = st.tuples(st.just("forward"), st.integers(1, 70))


@given(moves(100, CROP, FORWARD), st.sampled_from([8, 4]))
def test_keys_after_any_program_are_those_of_formula_rotated_once(program, bits):
    cache, plain = both(100, bits)
    for operation, *arguments in program:
        if operation == "forward":
            if not cache.get_seq_length():
                continue
            plain.close()
            goes_on_alike(cache, plain, steps=1, size=arguments[0], within=1)
        elif operation == "crop":
            cache.crop(arguments[0])
            plain.crop(0, -arguments[0])
        else:
            getattr(cache, operation)(*arguments)
            getattr(plain, operation)(*arguments)
    first = cache.materialize()[0]  # its K and V do not depend on context, so no rounding falls the other way
    for got, expected in zip((first.keys, first.values), plain.shown(0)[0], strict=True):
        assert got.shape == expected.shape
        assert not got.numel() or float((got - expected).abs().max()) <= 1e-5


def test_scales_of_what_was_cropped_are_given_back():
    cache = filled()
    sizes = []
    for step in range(6):
        fed(cache, prompt(128, step))
        sizes.append(cache.nbytes)
        cache.crop(-128)
    assert len(set(sizes[1:])) == 1


WRONG = {
    "without scales": lambda state: [state.pop(name) for name in [*state] if "scale" in name],
    "with NaN": lambda state: state["layer.1.k.scale"][0, 0].fill_(float("nan")),
    "of another group": lambda state: state["layer.0.groups"][-1:].fill_(3),
    "with too large a group": lambda state: state["layer.0.groups"][:33].fill_(0),
    "unsorted": lambda state: state["layer.0.groups"].copy_(state["layer.0.groups"].flip(0)),
    "shorter": lambda state: state.update({"layer.1.v.scale": state["layer.1.v.scale"][:, :-1].contiguous()}),
}


def test_session_with_wrong_scales_or_of_other_bits_is_refused(tmp_path):
    path = tmp_path / "chat"
    caches = {bits: filled(bits=bits) for bits in (8, 4, None)}
    save_session(caches[8], path)
    check_refused(caches[8], path, WRONG)
    for saved, other in ((8, None), (None, 8), (8, 4)):
        save_session(caches[saved], path)
        before = bits_of(caches[other])
        with pytest.raises(StoreError, match=r"another kv_bits .*Load it with the kv_bits"):
            load_session(caches[other], path)
        assert same(bits_of(caches[other]), before)


def test_sequence_beside_others_keeps_its_scales(tmp_path):
    cache = SequenceCache(MODEL, kv_bits=8)
    plain = Plain(MODEL, 8)
    fed(cache, prompt(150, 8))
    plain.forward(prompt(150, 8))
    save_session(cache, tmp_path / "one", sequence=0)
    other, beside = both(100)
    load_session(other, tmp_path / "one", sequence=1)
    assert other.state()["layer.0.groups"].tolist() == [cell // GROUP for cell in range(64 + 96)]
    for number, expected in ((1, plain), (0, beside)):
        other.use(number)
        shows(other, expected)


def test_cells_in_another_order_keep_scales_of_their_groups():
    cache, plain = both(150)
    for one in (cache, plain):
        one.copy(0, 1, 70, 150)
        one.copy(0, 1, 0, 70)
        one.remove(0, 16, 48)  # as many cells as a group has
    for number in (1, 0):
        cache.use(number)
        assert cache.positions(number) == [at for _, at in plain.row(number)]
        shows(cache, plain, number)
    cache.use(1)
    goes_on_alike(cache, plain, steps=3)


def test_other_bits_are_refused():
    for bits in (2, 16, 8.0, "8", True):
        with pytest.raises(ConfigError, match=r"kv_bits is .* 8, 4 or None"):
            SequenceCache(MODEL, kv_bits=bits)
