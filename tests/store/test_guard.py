# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What is handed out cannot change what is held."""

import pytest
import torch

from hf_blend.store import ChunkStore
from hf_blend.store.guard import Guard


def in_inference_mode(states):
    with torch.inference_mode():
        states.mul_(2)


WRITES = {
    "in place": lambda states: states.mul_(2),
    "a value": lambda states: states.view(-1).__setitem__(7, 5.0),
    "through a view": lambda states: states[:, 1:].zero_(),
    "in inference mode": in_inference_mode,
    "through data": lambda states: states.data.add_(1),
    "through numpy": lambda states: states.numpy().__iadd__(1),
    "through detach": lambda states: states.detach().zero_(),
    "through other bits": lambda states: states.view(torch.int32).zero_(),
    "other data": lambda states: setattr(states, "data", torch.zeros_like(states)),
    "another shape": lambda states: states.unsqueeze_(0),
    "copied over": lambda states: states.copy_(torch.zeros_like(states)),
    "by an out argument": lambda states: torch.add(states, 1, out=states),
    "by a fused optimizer": lambda states: torch._foreach_add_([states], 1),
}
PARTS = {
    "K": lambda chunk: chunk.layers[0][0],
    "V": lambda chunk: chunk.layers[-1][1],
    "a table": lambda chunk: chunk.tables[0][0],
}


WAYS = ["put", "get", "stream", "int8", "put in inference mode", "get in inference mode"]
# every write, where tensors count their writes and where they do not; and every way and part, where few writes do
CASES = [(way, write, "K") for way in ("put", "put in inference mode") for write in WRITES]
CASES += [(way, "in place", "V") for way in WAYS]
CASES += [("get", write, part) for write in ("in place", "other data") for part in PARTS]


@pytest.fixture
def handed(request, tmp_path, chunk):
    """A store that holds a chunk, by the way in which it came there."""
    stored = chunk(range(20))
    with torch.inference_mode("put in inference" in request.param):
        codec = "int8" if request.param == "int8" else "raw"
        store = ChunkStore.open(tmp_path, codec=codec, durability="none")
        kept = store.put(stored).map(torch.clone)
    if request.param.startswith(("get", "stream", "int8")):
        store = ChunkStore.open(tmp_path, durability="none")
    with torch.inference_mode(request.param == "get in inference mode"):
        if request.param == "stream":
            list(store.stream(stored.key, lambda: stored).layers)
        elif request.param.startswith(("get", "int8")):
            store.get(stored.key)
    assert store.tier_of(stored.key) == "memory"
    return store, kept


@pytest.mark.parametrize(("handed", "write", "part"), CASES, indirect=["handed"])
def test_whatever_is_written_to_a_chunk_the_next_hit_is_what_was_stored(handed, same, write, part):
    store, kept = handed
    got = store.get(kept.key)
    WRITES[write](PARTS[part](got))
    same(store.get(kept.key), kept)
    is_own_view = write == "other data" and part != "a table"  # views are made for the asker
    assert store.stats()["load_failures"] == ({} if is_own_view else {"memory:changed": 1})
    assert store.get(kept.key) is store.get(kept.key)


def test_one_value_in_a_large_tensor_is_seen_where_it_is_written_in_place(chunk, same):
    store, stored = ChunkStore.open("memory://"), chunk(range(2000))
    for part in (lambda got: got.layers[0][0], lambda got: got.layers[1][1], lambda got: got.tables[0][1]):
        store.put(stored)
        part(store.get(stored.key)).view(-1)[1000] += 1
        assert store.get(stored.key) is None


def test_what_is_written_while_a_chunk_is_still_being_read_is_not_held(tmp_path, chunk, same, monkeypatch):
    monkeypatch.setattr("hf_blend.store.stream.READ_BYTES", 1)
    stored = chunk(layers=3)
    ChunkStore.open(tmp_path).put(stored)
    store = ChunkStore.open(tmp_path)
    flying = store.stream(stored.key, lambda: stored)
    flying.layers[0][0].zero_()
    list(flying.layers)
    assert store.tier_of(stored.key) == "disk"
    same(store.get(stored.key), stored)


@pytest.mark.parametrize("handed", WAYS, indirect=True)
def test_reading_is_no_write(handed, same):
    store, kept = handed
    for _ in range(3):
        got = store.get(kept.key)
        torch.matmul(got.layers[0][0], got.layers[0][0].transpose(1, 2)).softmax(-1)
        got.layers[0][1][:, 2:].clone().mul_(3)
        got.map(lambda tensor: tensor.to(torch.float64))
    same(store.get(kept.key), kept)
    assert store.stats()["load_failures"] == {}


def test_a_guard_watches_empty_strided_and_narrow_tensors():
    strided, narrow = torch.zeros(4, 4).t(), torch.zeros(3, dtype=torch.float8_e4m3fn)
    for write in (lambda: strided.fill_(1), lambda: narrow.view(torch.uint8).fill_(1)):
        guard = Guard([torch.empty(0), strided, narrow])
        assert guard.is_intact()
        write()
        assert not guard.is_intact()
