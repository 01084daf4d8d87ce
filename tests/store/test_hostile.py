# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files that somebody crafted who knows the format, with valid digests and seals: a miss, a counter, and gone."""

import json

import numpy as np
import pytest
import torch

from hf_blend.model.capture import capture_chunk, layout_of
from hf_blend.model.identity import fingerprint
from hf_blend.store import ChunkStore, index
from tests.asking import logits, memory

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
        rows = forge.tensors(chunk)[:2]
        for name, tensor in chunk.named_tensors():
            if name.startswith(part):
                tensor = change(tensor)
            rows.append(forge.row(name, tensor))
        return {"tensors": rows}

    return changed


def layers(count):
    def changed(forge, chunk):
        removed = tuple(f"layer.{layer}" for layer in range(count, 2))
        kept = [row for row in forge.tensors(chunk) if not row[0].startswith(removed)]
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
    "a layer less": (layers(1), "layout"),
    "no layers": (layers(0), "layout"),
    "unturned layers": (lambda *_: {"layer_table": "[-1,-1]"}, "layout"),
    "whole numbers": (said_to_be("I32"), "format"),
}
each = pytest.mark.parametrize(("craft", "reason"), CRAFTED.values(), ids=CRAFTED)


def test_forge_writes_format_that_is_read(chunk, forge, content):
    assert forge(chunk()) == content(chunk())


def planted(root, forge, stored, craft):
    """A store in which the entry of the chunk was replaced."""
    store = ChunkStore.open(root, memory_bytes=0, durability="none")
    store.put(stored)
    (path,) = (root / "objects").rglob("*.safetensors")
    changes = craft(forge, stored)
    path.write_bytes(forge(stored, **changes))
    return store, path


@each
def test_crafted_entry_costs_request_time_and_nothing_else(tmp_path, forge, model, stored, wanted, craft, reason):
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


def test_chunk_of_another_layout_in_memory_is_dropped(model, stored, chunk):
    layout = layout_of(model)
    store = memory()
    store.put(chunk(CHUNK, fingerprint=stored.key.fingerprint))
    assert store.get(stored.key) is not None
    assert store.get(stored.key, layout=layout) is None
    assert store.stats()["load_failures"] == {"memory:layout": 1}
    store.put(stored)
    assert store.get(stored.key, layout=layout) is not None


CRAFTED_ROWS = {
    "sizes beyond all disks": {"nbytes": 1 << 63},
    "times without end": {"created": float("inf")},
    "ids of another chunk": {"start": 0},
    "a longer prefix": {"prefix": 2},
    "a window far behind": {"offset": 1 << 30},
    "ids in memory": {"flags": 2},
    "another digest": {"digest": b"\1" * 32},
}


@pytest.mark.parametrize("craft", CRAFTED_ROWS.values(), ids=CRAFTED_ROWS)
def test_crafted_log_changes_at_most_what_is_listed_and_who_leaves(tmp_path, chunk, same, craft):
    stored = {}
    prompt = []
    given = {"memory_bytes": 0, "durability": "none"}
    with ChunkStore.open(tmp_path, **given) as store:
        for number in (10, 50, 90):
            one = store.put(chunk(range(number, number + 30)))
            stored[one.key.digest] = one
            prompt += [5, *one.key.token_ids]
        disk_bytes = store.stats()["bytes"]["disk"]
    (path,) = (tmp_path / "index").glob("*.rows")
    rows = np.frombuffer(path.read_bytes(), index._ROW).copy()
    for name, value in craft.items():
        rows[name][1:] = value
    rows["check"] = index._checks_of(rows)
    path.write_bytes(rows.tobytes())
    with ChunkStore.open(tmp_path, **given) as store:
        fingerprint = one.key.fingerprint
        for span in store.find(fingerprint, (1,), prompt):
            assert span.key.digest in stored
        assert len(store) == 3
        for entry in store.entries():
            assert entry.digest in stored
        for digest in store.index.digests():
            listed = store.index.get(digest)
            assert listed is None or listed.key.digest == digest
        store.known(fingerprint)
        store.sample(fingerprint, (1,))
        for one in stored.values():
            same(store.get(one.key), one)
    with ChunkStore.open(tmp_path, **given, disk_bytes=disk_bytes) as store:
        for number in range(200, 203):
            store.put(chunk(range(number, number + 30)))
        assert store.stats()["bytes"]["disk"] <= disk_bytes
