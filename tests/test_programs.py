# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Random programs of operations on a cache: each turn is that of stock `generate`, and none raises raw."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_blend import BlendCache
from hf_blend.errors import HfBlendError
from tests.test_conformance import KINDS, asked, check_equal, edited, prompted

NAMES = ("BlendCache", "kv_bits", "kv_device_map", "windows", "convolution", "linear attention")
OPERATIONS = st.tuples(
    st.sampled_from(["turn", "turn", "turn", "edit", "rows", "crop", "heal", "copy", "save", "adapter", "reset"]),
    st.integers(1, 12),
)
PROGRAMS = st.lists(OPERATIONS, min_size=3, max_size=7)


class Program:
    """A cache, the ids of its conversation, and whether the model's adapter, a scaled weight, is on."""

    def __init__(self, name, path):
        self.name = name
        self.kind = KINDS[name]
        self.model = self.kind.model
        self.weight = next(self.model.parameters())
        self.path = path
        self.cache = self.kind.make()
        self.ids = None
        self.is_on = False

    def turn(self, number):
        inputs = prompted(self.cache, self.ids, number)
        got = asked(self.model, inputs, {}, self.cache)
        stock = asked(self.model, inputs, {}, DynamicCache(config=self.model.config))
        check_equal(got, stock, self.name == "kv_bits")
        self.ids = got["sequences"][0]

    def edit(self, number):
        self.ids = edited(self.cache, self.ids)

    def rows(self, number):
        self.ids = self.ids[:1].repeat(1 + number % 3, 1)

    def crop(self, number):
        self.cache.crop(-number)

    def heal(self, number):
        self.cache.heal(10 * number)

    def copy(self, number):
        self.cache = copy.deepcopy(self.cache)

    def save(self, number):
        self.cache.save(self.path)
        self.cache = BlendCache.load(self.model, self.cache.store, self.path, self.cache.config)

    def adapter(self, number):
        self.weight.data.mul_(0.5 if self.is_on else 2.0)
        self.is_on = not self.is_on

    def reset(self, number):
        self.cache.reset()

    def run(self, operations):
        """Take the operations; what is refused by name changes nothing."""
        try:
            for name, number in operations:
                if self.ids is None and name in ("edit", "rows"):
                    continue
                try:
                    getattr(self, name)(number)
                except HfBlendError:
                    assert name != "turn", "a prompt that the cache built itself"
        finally:
            if self.is_on:
                self.adapter(1)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None, print_blob=True)
@given(operations=PROGRAMS)
def test_program_gives_what_stock_gives(name, operations, tmp_path_factory):
    Program(name, tmp_path_factory.mktemp("programs") / "session").run(operations)
