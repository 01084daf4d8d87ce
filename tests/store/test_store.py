# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The store as users see it: what was stored comes back exactly, and every fault is a miss with a reason."""

import errno
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend.errors import ConfigError, PromptError, StoreError
from hf_blend.model import capture
from hf_blend.recipes import Recipe
from hf_blend.store import ChunkKey, ChunkStore
from hf_blend.store.memory import MemoryCache, available_bytes
from hf_blend.store.tiers import disk
from hf_blend.store.tiers.base import EntryFault
from tests.asking import noting, raising

STEPS = st.lists(st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(1, 9)), max_size=40)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv-store"


@pytest.fixture
def opened(root):
    """Open the same directory again, as another process would."""
    return lambda **settings: ChunkStore.open(root, **{"memory_bytes": 1 << 20, **settings})


def three(chunk, store):
    """Put three chunks, and give them."""
    chunks = [chunk((5, 6, number)) for number in range(3)]
    for one in chunks:
        store.put(one)
    return chunks


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def path_of(root: Path, key: ChunkKey) -> Path:
    (path,) = root.rglob(f"{key.digest}.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_tier_gives_back_bits_that_were_put(opened, chunk, same, dtype):
    stored = chunk(dtype=dtype)
    store = opened()
    assert store.get(stored.key) is None
    store.put(stored)
    same(store.get(stored.key), stored)
    fresh = opened()
    same(fresh.get(stored.key), stored)
    same(fresh.get(stored.key), stored)
    assert store.stats()["hits"] == {"memory": 1}
    assert fresh.stats()["hits"] == {"disk": 1, "memory": 1}
    assert store.stats()["misses"] == {"absent": 1}


@pytest.mark.parametrize("heads", [2, 1])  # of the last layer: layers that are alike are stacked
def test_hit_is_shared_and_put_is_copied(opened, chunk, same, heads):
    stored = chunk()
    keys, values = stored.layers[1]
    stored = replace(stored, layers=(stored.layers[0], (keys[:heads], values[:heads])))
    kept = replace(stored.map(torch.clone), importance=stored.importance.clone())
    store = opened()
    store.put(stored)
    for tensor in (stored.importance, stored.tables[0][0], stored.layers[0][0]):
        tensor.zero_()
    same(store.get(stored.key), kept)
    assert store.get(stored.key) is store.get(stored.key)


def test_gets_leave_bytes_on_disk_alone(opened, root, chunk, files):
    store = opened()
    chunks = three(chunk, store)
    before = files(root)
    fresh = opened()
    for one in chunks:
        fresh.get(one.key)
        store.get(one.key)
    fresh.find(chunks[0].key.fingerprint, (1,), [5, 6, 1])
    fresh.close()
    assert files(root) == before
    assert len(before) == 3


@pytest.mark.parametrize(("place", "reason"), [(-3, "digest"), (40, "format"), (None, "truncated")])
def test_damaged_entry_is_miss_once_and_heals(opened, root, chunk, same, caplog, place, reason):
    stored = chunk()
    opened().put(stored)
    path = path_of(root, stored.key)
    damaged = bytearray(path.read_bytes())
    if place is None:
        del damaged[-1]
    else:
        damaged[place] ^= 4
    path.write_bytes(damaged)
    store = opened()
    with caplog.at_level(logging.WARNING):
        assert store.get(stored.key) is None
        assert store.get(stored.key) is None
    (warning,) = warnings(caplog)
    assert stored.key.digest in warning
    assert reason in warning
    counts = store.stats()
    assert counts["misses"] == {reason: 1, "absent": 1}
    assert counts["removed"] == {"corrupt": 1}
    store.put(stored)
    same(opened().get(stored.key), stored)


def test_two_keys_with_one_digest_never_get_each_others_chunk(opened, chunk, same, monkeypatch):
    monkeypatch.setattr(ChunkKey, "digest", "00" * 32)
    one = chunk((5, 6, 7), seed=1)
    other = chunk((5, 6, 8), seed=2)
    store = opened()
    store.put(one)
    same(store.get(one.key), one)
    assert store.get(other.key) is None
    assert store.stats()["misses"] == {"key": 1}
    store.put(one)
    store.put(other)
    same(store.get(other.key), other)
    assert opened().get(other.key) is None


def test_another_model_or_dtype_never_gets_chunk(opened, root, chunk):
    stored = chunk()
    opened().put(stored)
    foreign = chunk(fingerprint="cd" * 32)
    path = path_of(root, stored.key)
    shutil.copy(path, path.with_stem(foreign.key.digest))
    store = opened()
    assert store.get(foreign.key) is None
    assert store.stats()["misses"] == {"fingerprint": 1}
    assert store.find(foreign.key.fingerprint, (1,), [5, 6, 7]) == []


def test_read_error_is_miss_and_entry_stays(opened, root, chunk, same, monkeypatch, caplog):
    stored = chunk()
    opened().put(stored)
    store = opened()
    monkeypatch.setattr(disk.os, "preadv", raising(OSError(errno.EIO, "an I/O error")))
    assert store.get(stored.key) is None
    assert store.get(stored.key) is None
    assert store.stats()["misses"] == {"io": 2}
    assert len(warnings(caplog)) == 1
    monkeypatch.undo()
    same(store.get(stored.key), stored)
    assert len(store.find(stored.key.fingerprint, (1,), [5, 6, 7])) == 1


def test_too_little_memory_to_read_is_miss(opened, chunk, monkeypatch):
    stored = chunk()
    opened().put(stored)
    store = opened()
    original = torch.empty

    def full(size, **kwargs):
        if size > 100:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return original(size, **kwargs)

    monkeypatch.setattr(torch, "empty", full)
    assert store.get(stored.key) is None
    assert store.stats()["misses"] == {"memory": 1}
    assert store.contains(stored.key)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_nan_and_infinity_are_never_stored(opened, root, chunk, files, value, dtype):
    poisoned = chunk(dtype=dtype)
    poisoned.layers[1][1].view(-1)[3:4].copy_(torch.tensor([value]))
    store = opened()
    with pytest.raises(StoreError, match=r"layer\.1\.v .* NaN or infinity"):
        store.put(poisoned)
    assert files(root) == {}
    assert store.get(poisoned.key) is None
    opened().put(chunk(dtype=dtype))
    path = path_of(root, poisoned.key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(EntryFault, match="digest"):
        list(opened().stream(poisoned.key).layers)
    assert store.get(poisoned.key) is None


def test_malformed_chunks_are_refused_by_name(opened, chunk):
    good = chunk()
    keys, values = good.layers[0]
    wrong = {
        "layer.0.k": replace(good, layers=((keys[:, :2], values), good.layers[1])),
        "table.0.cos": replace(good, tables=((good.tables[0][0][:1], good.tables[0][1]),)),
        "layer_table": replace(good, layer_table=(0, 1)),
    }
    for name, bad in wrong.items():
        with pytest.raises(StoreError, match=name):
            opened().put(bad)


def full_disk(monkeypatch):
    monkeypatch.setattr(disk.os, "write", raising(OSError(errno.ENOSPC, "no space left")))


def test_full_disk_costs_only_disk_copy(opened, root, chunk, same, files, monkeypatch, caplog):
    store = opened()
    full_disk(monkeypatch)
    chunks = three(chunk, store)
    monkeypatch.undo()
    assert files(root) == {}
    same(store.get(chunks[0].key), chunks[0])
    assert len(store.find(chunks[0].key.fingerprint, (1,), [5, 6, 1])) == 1
    assert store.stats()["store_failures"] == {"ENOSPC": 3}
    assert store.stats()["bytes"]["disk"] == 0
    assert len(warnings(caplog)) == 1
    store.put(chunks[0])
    same(opened().get(chunks[0].key), chunks[0])
    store = opened(memory_bytes=0)
    full_disk(monkeypatch)
    store.put(chunk())
    assert len(store) == 0


def test_key_of_another_namespace_is_never_answered(opened, chunk, same):
    mine = chunk(namespace="a")
    theirs = chunk(namespace="b")
    a = opened(namespace="a")
    b = opened(namespace="b")
    asked = (mine.key.fingerprint, (1,), [5, 6, 7])
    a.put(mine)
    assert b.find(*asked) == []
    assert list(b.entries()) == []
    b.put(theirs)
    assert a.get(theirs.key) is None
    assert a.stats()["misses"] == {"namespace": 1}
    assert not a.contains(theirs.key)
    assert not a.delete(theirs.key)
    with pytest.raises(StoreError, match="another namespace"):
        a.put(theirs)
    assert [found.key for found in opened(namespace="a").find(*asked)] == [mine.key]
    assert len(opened()) == 0
    same(opened(namespace="b").get(theirs.key), theirs)


def test_neither_files_nor_logs_hold_namespace(opened, root, chunk, files, caplog):
    store = opened(namespace="s3cret")
    with caplog.at_level(logging.DEBUG):
        store.put(chunk(namespace="s3cret"))
        path = path_of(root, chunk(namespace="s3cret").key)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        opened(namespace="s3cret").get(chunk(namespace="s3cret").key)
        store.close()
    everything = caplog.text + "".join(map(str, root.rglob("*")))
    assert "s3cret" not in everything
    assert all(b"s3cret" not in path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_open_refuses_what_it_cannot_use_and_shows_no_password(root):
    for text, location, wrong in (
        ("kind gopher ", "gopher://user:hunter2@host/bucket", {}),
        ("expected a directory", "", {}),
        ("expected a directory", "a\0b", {}),
        (r"'fulll'.*Did you mean 'full'", root, {"durability": "fulll"}),
        ("memory_bytes is -1", root, {"memory_bytes": -1}),
    ):
        with pytest.raises(ConfigError, match=text) as caught:
            ChunkStore.open(location, **wrong)
        assert "hunter2" not in str(caught.value)


def set_assets_cache(monkeypatch, folder):
    original = huggingface_hub.cached_assets_path
    monkeypatch.delenv("HF_BLEND_HOME", raising=False)
    monkeypatch.setattr(
        huggingface_hub, "cached_assets_path", lambda *args, **names: original(*args, **names, assets_dir=folder)
    )


def test_default_location_is_assets_cache_or_home_that_was_set(tmp_path, chunk, monkeypatch):
    set_assets_cache(monkeypatch, tmp_path / "assets")
    ChunkStore.open(memory_bytes=0).put(chunk())
    assert list((tmp_path / "assets").rglob("*.safetensors"))
    monkeypatch.setenv("HF_BLEND_HOME", str(tmp_path / "home"))
    ChunkStore.open(memory_bytes=0).put(chunk())
    assert list((tmp_path / "home" / "chunks").rglob("*.safetensors"))


@pytest.mark.parametrize("way", ["a folder", "HF_BLEND_HOME"])
def test_relative_location_stays_where_it_was_opened(way, tmp_path, chunk, same, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_BLEND_HOME", "kv")
    with ChunkStore.open("kv" if way == "a folder" else None, memory_bytes=0) as store:
        store.put(chunk((5, 6)))
        store.recipes.put("f" * 64, Recipe({"recompute_ratio": 0.2}, "tuned"))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.put(chunk((5, 7)))
        store.recipes.put("e" * 64, Recipe({"recompute_ratio": 0.3}, "tuned"))
        for ids in ((5, 6), (5, 7)):
            same(store.get(chunk(ids).key), chunk(ids))
        assert len(list(store.folder.rglob("*.json"))) == 2
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_unusable_assets_cache_is_refused_with_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    set_assets_cache(monkeypatch, tmp_path / "file")
    with pytest.raises(StoreError, match="HF_BLEND_HOME"):
        ChunkStore.open()


def test_memory_store_writes_nothing_and_forgets_what_it_drops(chunk, same, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChunkStore.open("memory://", memory_bytes=2 * chunk().nbytes) as store:
        first, second, third = three(chunk, store)
        assert store.get(first.key) is None
        assert store.find(first.key.fingerprint, (1,), [5, 6, 0]) == []
        assert len(store.find(first.key.fingerprint, (1,), [5, 6, 2])) == 1
        assert store.stats()["evicted"] == {"memory": 1}
        same(store.get(second.key), second)
        store.put(first)
        assert not store.contains(third.key), "the other one was used since"
        assert store.delete(second.key)
        assert not store.delete(second.key)
        assert not store.contains(second.key)
    assert list(tmp_path.iterdir()) == []


@given(STEPS, st.integers(0, 9))
def test_memory_never_holds_more_than_its_cap_or_one_chunk_and_drops_least_recent(chunk, steps, cap_tokens):
    unit = chunk((5,)).nbytes
    tier = MemoryCache(cap_tokens * unit)
    held = {}  # digest → tokens, the least recently used first
    for step, tokens in steps:
        one = chunk(range(tokens))
        digest = one.key.digest
        known = held.pop(digest, None)
        if step == "delete":
            tier.delete(digest)
        elif step == "get":
            assert (one.key in tier.get((one.key,))) == (known is not None)
            if known is not None:
                held[digest] = known
        else:
            tier.put(one)
            if cap_tokens:
                held[digest] = tokens
        while sum(held.values()) > cap_tokens and len(held) > 1:
            del held[next(iter(held))]
        assert set(tier.digests()) == set(held)
        assert tier.nbytes == sum(held.values()) * unit


def test_delete_that_disk_refuses_is_error(opened, chunk, monkeypatch):
    store = opened()
    store.put(chunk())
    refused = raising(PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr("hf_blend.store.tiers.disk.os.unlink", refused)
    with pytest.raises(StoreError, match="cannot be removed"):
        store.delete(chunk().key)
    monkeypatch.undo()
    store.put(chunk())
    monkeypatch.setattr("hf_blend.store.tiers.disk.os.unlink", refused)
    store.reject(chunk().key, "layout")  # does not raise
    assert store.stats()["misses"] == {"layout": 1}


def test_add_computes_what_is_missing_and_nothing_else(tiny_model, tokenizer, opened, same, monkeypatch):
    model = tiny_model("llama")
    calls = []
    noting(monkeypatch, capture, "cut_chunk", lambda _, key: calls.append(key.token_ids))
    store = opened()
    keys = store.add(model, tokenizer, ["abc", [10, 11], "abc"])
    assert [key.chunk_prefix_ids for key in keys] == [(1,)] * 3
    assert keys[0] == keys[2]
    assert calls == [(100, 101, 102), (10, 11)]
    assert store.add(model, None, [[10, 11]]) == keys[1:2]
    assert len(calls) == 2
    stored = opened().get(keys[1])
    same(stored, capture.capture_chunk(model, keys[1].token_ids, (1,), keys[1].fingerprint))
    (bare,) = store.add(model, None, [[10, 11]], chunk_prefix_ids=())
    assert bare.chunk_prefix_ids == ()
    assert store.get(bare) is not None
    with pytest.raises(PromptError, match="expected a list"):
        store.add(model, tokenizer, "abc")


GIB = 1 << 30


@pytest.fixture
def process(monkeypatch):
    """The machine has 64 GiB left, and this process holds 1."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("M", (), {"available": 64 * GIB}))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: type("M", (), {"rss": GIB}))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("own=0::/ memory.max=8589934592", 7),
        ("own=0::/a/b a/b/memory.max=max a/memory.max=4294967296 memory.max=17179869184", 3),
        ("own=5:cpu:/x\n4:memory:/docker/1\n0::/ memory/memory.limit_in_bytes=8589934592", 7),
        ("own=4:memory:/ memory/memory.limit_in_bytes=9223372036854771712", 64),
        ("memory.max=8589934592", 64),
    ],
)
def test_smallest_limit_of_all_groups_holds(limits, expected, tmp_path, process):
    for line in limits.split(" "):
        path, _, content = line.partition("=")
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    assert available_bytes(tmp_path, tmp_path / "own") // GIB == expected
