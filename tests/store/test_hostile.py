# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files that somebody crafted who knows the format, with valid digests and seals: a miss, a counter, and gone."""

import contextlib
import json
import sqlite3

import pytest
import torch

from hf_blend.model.capture import capture_chunk
from hf_blend.model.fingerprint import fingerprint
from hf_blend.prefill.layout import layout_of
from hf_blend.store import ChunkStore
from hf_blend.store.entry import encode_entry
from tests.asking import logits

CHUNK = list(range(20, 44))
PIECES = {"prefix": [5, 6], "chunks": [CHUNK, list(range(50, 70))], "question": [7, 8, 9]}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(num_hidden_layers=2)


@pytest.fixture(scope="module")
def stored(model):
    """A chunk as a request computes it."""
    return capture_chunk(model, CHUNK, (1,), fingerprint(model))


@pytest.fixture(scope="module")
def wanted(model):
    return logits(model, PIECES, recompute_ratio=0.3)[0]


def all_of(part, change):
    """Change each tensor whose name begins so."""

    def changed(forge, chunk):
        rows = [(name, tensor) for name, tensor in chunk.named_tensors()]
        made = [forge.row(name, change(tensor) if name.startswith(part) else tensor) for name, tensor in rows]
        return {"tensors": forge.tensors(chunk)[:2] + made}

    return changed


def one_value(part, value):
    def change(tensor):
        other = tensor.clone()
        other.view(-1)[5] = value
        return other

    return all_of(part, change)


def layers(count):
    def changed(forge, chunk):
        kept = [row for row in forge.tensors(chunk) if not row[0].startswith("layer") or int(row[0][6]) < count]
        return {"tensors": kept, "layer_table": json.dumps([0] * count)}

    return changed


def said_to_be(dtype):
    def changed(forge, chunk):
        rows = forge.tensors(chunk)
        return {"tensors": [(name, dtype if name[:5] == "layer" else was, *rest) for name, was, *rest in rows]}

    return changed


CRAFTED = {
    "a table beyond all numbers": (lambda *_: {"layer_table": "[1e999]"}, "format"),
    "a head more": (all_of("layer", lambda states: torch.cat([states, states[:1]])), "layout"),
    "wider keys": (all_of("layer.0.k", lambda keys: torch.cat([keys, keys], dim=2)), "layout"),
    "wider tables": (all_of("table", lambda table: torch.cat([table, table], dim=1)), "layout"),
    "sixteen bits": (all_of("layer", lambda states: states.half()), "layout"),
    "eight bytes in one layer": (all_of("layer.1.v", lambda states: states.double()), "layout"),
    "a layer less": (layers(1), "layout"),
    "no layers": (layers(0), "layout"),
    "unturned layers": (lambda *_: {"layer_table": "[-1,-1]"}, "layout"),
    "whole numbers": (said_to_be("I32"), "format"),
    "NaN in K": (one_value("layer.1.k", float("nan")), "values"),
    "infinity in V": (one_value("layer.0.v", float("-inf")), "values"),
    "absurd values": (one_value("layer.0.k", 3e38), "values"),
    "NaN in a table": (one_value("table.0.cos", float("nan")), "values"),
    "a cosine of zeros": (all_of("table.0.cos", torch.zeros_like), "values"),
    "tables of zeros": (all_of("table", torch.zeros_like), "values"),
    "a table of garbage": (all_of("table", lambda table: 7 * torch.ones_like(table)), "values"),
}
each = pytest.mark.parametrize(("craft", "reason"), CRAFTED.values(), ids=CRAFTED)


def test_the_tests_write_the_format_that_is_read(chunk, forge):
    assert forge(chunk()) == b"".join(encode_entry(chunk()))


def planted(root, forge, stored, craft):
    """A store in which the entry of the chunk was replaced."""
    store = ChunkStore.open(root, memory_bytes=0, durability="none")
    store.put(stored)
    (path,) = (root / "objects").rglob("*.safetensors")
    changes = craft(forge, stored)
    path.write_bytes(forge(stored, **changes))
    return store, path


@each
def test_a_crafted_entry_costs_a_request_time_and_nothing_else(tmp_path, forge, model, stored, wanted, craft, reason):
    store, _ = planted(tmp_path, forge, stored, craft)
    got, _ = logits(model, PIECES, store=store, recompute_ratio=0.3)
    assert torch.equal(got, wanted)
    counts = store.stats()
    assert sum(counts["load_failures"].values()) == counts["load_failures"][f"disk:{reason}"] > 0
    assert counts["removed"] == {"corrupt": 1}
    with ChunkStore.open(tmp_path, memory_bytes=0) as again:  # replaced by what the request computed
        found = again.get(stored.key)
    for (keys, values), (own_keys, own_values) in zip(found.layers, stored.layers, strict=True):
        assert torch.equal(keys, own_keys)
        assert torch.equal(values, own_values)


def test_a_chunk_of_another_layout_in_memory_is_dropped(model, stored, chunk):
    layout, store = layout_of(model), ChunkStore.open("memory://")
    store.put(chunk(CHUNK, fingerprint=stored.key.fingerprint))
    assert store.get(stored.key) is not None
    assert store.get(stored.key, layout=layout) is None
    assert store.stats()["load_failures"] == {"memory:layout": 1}
    store.put(stored)
    assert store.get(stored.key, layout=layout) is not None


CRAFTED_INDEXES = {
    "nothing": lambda db: None,
    "other tables": lambda db: db.execute("CREATE TABLE objects(name)"),
    "a table that computes for ever": lambda db: db.execute(
        "CREATE VIEW objects AS WITH RECURSIVE n(name) AS (SELECT '' UNION ALL SELECT name FROM n) SELECT name FROM n"
    ),
    "a later form": lambda db: db.execute("PRAGMA user_version = 9"),
}
CRAFTED_ROWS = {
    "sizes below nothing": "UPDATE objects SET nbytes = -5",
    "sizes beyond all disks": f"UPDATE objects SET nbytes = {1 << 62}",
    "sizes that are texts": "UPDATE objects SET nbytes = 'many', created = 'never'",
    "another owner": "UPDATE objects SET owner = 'me'",
    "a chunk that is not there": "UPDATE objects SET chunk = 7",
    "another chunk": "UPDATE objects SET chunk = chunk % 3 + 1",
    "ids below nothing": "UPDATE texts SET ids = x'ffffffff'",
    "ids of half a token": "UPDATE texts SET ids = x'0102'",
    "ids that are text": "UPDATE texts SET ids = 'abcd'",
    "other ids": "UPDATE texts SET ids = x'0500000009000000'",
    "another model": "UPDATE groups SET fingerprint = 5, prefix = 'x'",
    "hashes that are none": "UPDATE chunks SET head = 'zz', inside = 'é', width = 8",
    "more tokens than a prompt has": f"UPDATE chunks SET tokens = {1 << 62}",
    "states that are none": "UPDATE objects SET used = 9e999, frequency = 'x', share = '{}', score = 'x'",
    "frequencies without end": "UPDATE objects SET frequency = 9e999, share = -9e999",
    "uses without end": "UPDATE policy SET uses = 9e999",
    "a part that is not there": "INSERT INTO parts VALUES ('zz/', 'x', 'x')",
    "names that are none": "INSERT INTO objects(name, nbytes, score) VALUES ('ab', 5, 0), ('zz/', 5, 0)",
    "no rows": "DELETE FROM objects",
}


@pytest.mark.parametrize(
    ("craft", "eviction"),
    [
        (craft, ("lru", "lfu", "importance")[number % 3])
        for number, craft in enumerate([*CRAFTED_INDEXES.values(), *CRAFTED_ROWS.values()])
    ],
    ids=[*CRAFTED_INDEXES, *CRAFTED_ROWS],
)
def test_a_crafted_index_changes_at_most_what_is_listed_and_who_leaves(tmp_path, chunk, same, craft, eviction):
    stored = [chunk((5, number)) for number in range(3)]
    given = {"memory_bytes": 0, "durability": "none", "eviction": eviction}
    with ChunkStore.open(tmp_path, **given) as store:
        for one in stored:
            store.put(one)
        expected, entry_bytes = list(store.entries()), store.stats()["bytes"]["disk"] // 3
    (path,) = (tmp_path / "index").glob("*.sqlite")
    if callable(craft):
        path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        craft(db) if callable(craft) else db.executescript(craft)
    with ChunkStore.open(tmp_path, **given) as store:
        for key in (found.key for found in store.find(stored[0].key.fingerprint, (1,), [5, 9, 5, 0])):
            assert key in [one.key for one in stored]
        assert len(store) == 3
        assert list(store.entries()) == expected
        for one in stored:
            same(store.get(one.key), one)
    with ChunkStore.open(tmp_path, **given, disk_bytes=3 * entry_bytes) as store:
        for number in range(3, 6):
            store.put(chunk((5, number)))
            store.record_importance(chunk((5, number)).key, 0.5)
            same(store.get(chunk((5, number)).key), chunk((5, number)))
        assert store.stats()["evicted"] == {"disk": 3}


def test_names_that_are_no_names_are_passed_over(tmp_path, chunk):
    store = ChunkStore.open(tmp_path, memory_bytes=0)
    store.put(chunk())
    (path,) = (tmp_path / "objects").rglob("*.safetensors")
    space = path.parent.parent
    for folder, stem in (
        ("zz", "z" * 64),
        ("ab", "ab" + "G" * 62),
        ("é", "é" * 64),
        (path.parent.name, "\udcff" * 64),
    ):
        (space / folder).mkdir(exist_ok=True)
        name = f"{stem}.safetensors"
        if len(name.encode("utf-8", "surrogateescape")) < 256:
            (space / folder / name).write_bytes(b"x")
    (space / "file").write_bytes(b"x")
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "ab").write_bytes(b"x")
    again = ChunkStore.open(tmp_path, memory_bytes=0)
    assert [one.digest for one in again.entries()] == [chunk().key.digest]
    assert [one.reason for one in again.check()] == [""]
    again.collect(0)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_folder_that_is_a_link_is_not_written_behind(tmp_path, chunk, level):
    root, elsewhere = tmp_path / "s", tmp_path / "elsewhere"
    store = ChunkStore.open(root, memory_bytes=0)
    store.put(chunk())
    (path,) = (root / "objects").rglob("*.safetensors")
    folder = path.parents[level]
    folder.rename(tmp_path / "away")
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    for asked in (store, ChunkStore.open(root, memory_bytes=0)):
        asked.put(chunk())
        assert asked.get(chunk().key) is None
        assert set(asked.stats()["store_failures"]) == {"ENOTDIR"}
    assert list(elsewhere.iterdir()) == []


def test_an_index_folder_that_is_a_link_is_not_written_behind(tmp_path, chunk):
    (tmp_path / "s" / "objects").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s" / "index").symlink_to(tmp_path / "elsewhere")
    with ChunkStore.open(tmp_path / "s", memory_bytes=0) as store:
        store.put(chunk())
    assert list((tmp_path / "elsewhere").iterdir()) == []
