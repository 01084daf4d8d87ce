# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A store with a secret: nothing about its chunks can be told from names, and secrets do not meet."""

import hashlib
import hmac
import os

import pytest

from hf_blend import ConfigError
from hf_blend.store import ChunkStore
from hf_blend.store.seal import check_seal, keyed, seal
from hf_blend.store.tiers.base import EntryFault

ONE, TWO = b"one", b"two"


@pytest.fixture
def opened(tmp_path):
    def open_store(secret=None, **settings):
        return ChunkStore.open(
            tmp_path / "s", **{"memory_bytes": 0, "durability": "none", "secret": secret, **settings}
        )

    return open_store


@pytest.mark.parametrize("secret", ["text", b"", bytearray(b"x"), 5, ["a"]])
def test_a_secret_that_cannot_sign_is_refused_at_once(tmp_path, secret):
    for make in (lambda: ChunkStore.open(tmp_path / "s", secret=secret), lambda: ChunkStore([], secret=secret)):
        with pytest.raises(ConfigError, match=r"secret is .*expected bytes.*token_bytes") as caught:
            make()
        assert "text" not in str(caught.value).partition("expected")[0]
    assert not (tmp_path / "s").exists()


def test_no_name_can_be_computed_from_a_chunk_without_the_secret(tmp_path, opened, chunk):
    stored = chunk(namespace="tenant")
    with opened(ONE, namespace="tenant") as store:
        store.put(stored)
        store.pin(stored.key)
    names = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    space = hashlib.sha256(b"hf_blend.namespace/1\0tenant").hexdigest()
    assert not [name for name in names if stored.key.digest[:16] in name or space[:16] in name]
    assert not (tmp_path / "s" / "objects" / space[:2]).exists()
    digits = hmac.new(ONE, b"hf_blend.name\0" + stored.key.digest.encode(), "sha256").hexdigest()
    assert len([name for name in names if digits in name]) == 2  # the entry and its pin


def test_two_secrets_and_none_in_one_folder_do_not_see_each_other(opened, chunk, same):
    stores = {secret: opened(secret) for secret in (None, ONE, TWO)}
    for number, (_, store) in enumerate(stores.items()):
        store.put(chunk(seed=number))  # of one key, with KV of their own
        store.put(chunk((8, number), seed=number))
    for number, (secret, store) in enumerate(stores.items()):
        for asked in (store, opened(secret)):
            same(asked.get(chunk().key), chunk(seed=number))
            assert {one.digest for one in asked.entries()} == {chunk().key.digest, chunk((8, number)).key.digest}
            assert [found.key for found in asked.find(chunk().key.fingerprint, (1,), [8, 0, 8, 1, 8, 2])] == [
                chunk((8, number)).key
            ]
            assert sorted(one.reason for one in asked.check(repair=True) if one.reason != "secret") == ["", ""]
    stores[ONE].remove([chunk().key.digest])
    assert not stores[ONE].contains(chunk().key)
    assert stores[TWO].contains(chunk().key)
    assert stores[None].contains(chunk().key)


@pytest.fixture
def meeting(monkeypatch):
    """All secrets in one space, as happens to one in 256 pairs."""
    plain = keyed

    def one_space(secret, purpose, text):
        return "77" * 32 if purpose == "space" else plain(secret, purpose, text)

    monkeypatch.setattr("hf_blend.store.catalog.keyed", one_space)


def test_entries_of_another_secret_are_counted_as_such_and_never_removed(tmp_path, meeting, opened, chunk, same):
    for number, secret in enumerate((None, TWO)):
        opened(secret).put(chunk((5, number)))
    others = {path: path.read_bytes() for path in (tmp_path / "s" / "objects").rglob("*.safetensors")}
    for path in others:
        os.utime(path, (1, 1))
    with opened(ONE, ttl_s=3600) as store:
        store.put(chunk())
        assert [one.digest for one in store.entries()] == [chunk().key.digest]
        assert sorted(one.reason for one in store.check(repair=True)) == ["", "secret", "secret"]
        assert store.collect()["expired"] == 0
    for path, content in others.items():
        assert path.read_bytes() == content
    same(opened(ONE).get(chunk().key), chunk())


def test_a_damaged_entry_of_ones_own_is_told_from_one_of_another(tmp_path, meeting, opened, chunk):
    opened(TWO).put(chunk((8, 8)))
    store = opened(ONE)
    store.put(chunk())
    path = next(one for one in tmp_path.rglob("*.safetensors") if hmac_tag(ONE) in one.read_bytes())
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    assert sorted(one.reason for one in opened(ONE).check(repair=True)) == ["auth", "secret"]
    assert not path.exists()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def hmac_tag(secret):
    return hmac.new(secret, b"hf_blend.tag\0", "sha256").hexdigest()[:16].encode()


def test_an_index_of_names_that_say_nothing_is_as_fast(opened, chunk, monkeypatch):
    stored = [chunk((5, number)) for number in range(4)]
    with opened(ONE) as store:
        for one in stored:
            store.put(one)
        store.pin(stored[2].key)
    monkeypatch.setattr("hf_blend.store.catalog.read_key", None)
    again = opened(ONE)
    assert {one.digest: one.pinned for one in again.entries()} == {one.key.digest: one is stored[2] for one in stored}
    assert again.find(stored[0].key.fingerprint, (1,), [5, 1]) == [(0, stored[1].key, 0, 2)]
    assert again.remove([stored[0].key.digest]) == 1
    assert len(again) == 3


def test_eviction_quotas_and_pins_know_names_that_say_nothing(opened, chunk):
    stored = [chunk((5, number)) for number in range(4)]
    opened(TWO).put(stored[0])
    with opened(ONE) as store:
        store.put(stored[0])
        entry_bytes = next(iter(store.entries())).nbytes
    with opened(ONE, quota_bytes=2 * entry_bytes) as store:
        assert len(store) == 1
        store.pin(stored[0].key)
        for one in stored[1:]:
            store.put(one)
        assert [store.contains(one.key) for one in stored] == [True, False, False, True]
        assert {one.digest for one in store.entries()} == {stored[0].key.digest, stored[3].key.digest}
    assert opened(TWO).contains(stored[0].key)


def test_a_seal_says_why_it_does_not_fit():
    for secret in (None, ONE):
        good = seal(secret, b"content")
        check_seal(good, secret, b"con", b"tent")
        for found, reason in (
            (good, "auth" if secret else "format"),
            (seal(TWO, b"other"), "secret"),
            (seal(None if secret else ONE, b"other"), "secret"),
            (b"", "format"),
            (good[1:], "format"),
        ):
            with pytest.raises(EntryFault) as caught:
                check_seal(found, secret, b"other")
            assert caught.value.reason == reason
            assert caught.value.corrupt is (reason != "secret")
