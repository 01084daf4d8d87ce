# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every tier promises. A new tier is tested here as soon as `tier_factories` in conftest.py makes one."""

import pytest

from hf_blend.errors import ConfigError
from hf_blend.store import ChunkStore
from hf_blend.store.tiers.base import EntryFault, Tier

NAMES = [f"{number:016x}/{number:02x}{0:062x}" for number in range(3)]


@pytest.fixture
def tier(tier_factory, tmp_path):
    opened = tier_factory(tmp_path)
    yield opened
    opened.close()
    opened.close()


def content(tier: Tier, name: str) -> bytes | None:
    source = tier.open(name)
    if source is None:
        return None
    target = bytearray(source.stat.nbytes)
    source.read_into(0, memoryview(target))
    source.close()
    source.close()
    return bytes(target)


def put(tier: Tier, name: str, *parts: bytes) -> None:
    tier.put(name, [memoryview(part) for part in parts])


def test_tier_gives_back_what_was_put_last_and_nothing_else(tier):
    put(tier, NAMES[0], b"other")
    put(tier, NAMES[0], b"one", b"", b"two")
    assert content(tier, NAMES[0]) == b"onetwo"
    assert tier.contains(NAMES[0])
    assert tier.stat(NAMES[0]).nbytes == 6
    assert tier.open(NAMES[1]) is None
    assert tier.stat(NAMES[1]) is None
    assert not tier.contains(NAMES[1])
    assert not tier.delete(NAMES[1])


def test_parts_of_object_can_be_read_and_its_end_is_noticed(tier):
    put(tier, NAMES[0], bytes(range(100)))
    source = tier.open(NAMES[0])
    target = bytearray(5)
    source.read_into(90, memoryview(target))
    assert bytes(target) == bytes(range(90, 95))
    with pytest.raises(EntryFault, match="truncated"):
        source.read_into(96, memoryview(target))
    source.close()


def test_opened_object_stays_as_it_is_when_it_is_deleted_and_put_again(tier):
    put(tier, NAMES[0], b"first")
    source = tier.open(NAMES[0])
    target = bytearray(5)
    assert tier.delete(NAMES[0])
    put(tier, NAMES[0], b"other")
    source.read_into(0, memoryview(target))
    assert bytes(target) == b"first"
    source.close()
    assert content(tier, NAMES[0]) == b"other"


WRONG_NAMES = ["../../etc/passwd", "", "0" * 16 + "/" + "g" * 64, "A" * 16 + "/" + "0" * 64, NAMES[0] + "\n"]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_name_that_is_not_hex_is_refused(tier, name):
    with pytest.raises(ConfigError, match="is not <16 hex digits>"):
        put(tier, name, b"x")
    with pytest.raises(ConfigError, match="is not <16 hex digits>"):
        tier.open(name)


def test_store_on_tier_loads_what_it_stored_and_refuses_what_was_changed(tier, chunk, same):
    store = ChunkStore(None, [tier])
    stored = chunk()
    store.put(stored)
    same(store.get(stored.key), stored)
    (name, _), *others = tier.listing()
    assert not others
    good = content(tier, name)
    for position in range(0, len(good), 97):
        tier.delete(name)
        put(tier, name, good[:position], bytes([good[position] ^ 1]), good[position + 1 :])
        assert store.get(stored.key) is None
    assert not tier.contains(name), "what cannot become good is removed"
    store.put(stored)
    same(ChunkStore(None, [tier]).get(stored.key), stored)
    assert len(store) == 1


def test_objects_are_listed_by_prefix_with_their_sizes(tier):
    for number, name in enumerate(NAMES):
        put(tier, name, bytes(number + 1))
    first, second, third = NAMES
    sizes = {name: stat.nbytes for name, stat in tier.listing()}
    assert sizes == {first: 1, second: 2, third: 3}
    assert list(tier.names(second[:17])) == [second]
    assert [name for name, _ in tier.listing(second[:17])] == [second]
    tier.delete(second)
    assert sorted(tier.names()) == [first, third]
