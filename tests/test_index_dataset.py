# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A data set is indexed by several processes, and what is stored already is skipped."""

import pickle

import numpy as np
import pytest
from tiny_models import tiny_model as built

from hf_blend import ChunkStore, PromptError, StoreError
from hf_blend.integrations.indexing import IndexChunks

IDS = [[number, number + 1, 7] for number in range(20)]


def load():
    """A model without a tokenizer, for rows of ids."""
    return built("llama"), None


def test_index_chunks_stores_rows_of_data_set_from_two_processes(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"ids": [*IDS, IDS[0]]})
    index = IndexChunks(load, tmp_path / "kv", column="ids", threads=1)
    rows = dataset.map(index, batched=True, batch_size=4, num_proc=2, remove_columns=["ids"])
    assert rows["digest"][0] == rows["digest"][-1]
    with ChunkStore.open(tmp_path / "kv", memory_bytes=0) as store:
        assert {entry.digest for entry in store.entries()} == {*rows["digest"]}
        assert len(store) == len(IDS)


@pytest.mark.parametrize(("as_batch", "location"), [(list, "kv"), (np.array, {"location": "kv"})])
def test_index_chunks_skips_what_is_stored_and_survives_pickling(tmp_path, as_batch, location, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = pickle.loads(pickle.dumps(IndexChunks(load, location, column="ids")))
    monkeypatch.chdir("/")  # where another process may work
    digests = index({"ids": as_batch(IDS[:3])})["digest"]
    assert len({*digests}) == 3
    computing = "hf_blend.model.capture.compute_chunks"
    monkeypatch.setattr(computing, lambda model, keys, **_: [*keys] and pytest.fail("again"))
    assert index({"ids": as_batch(IDS[:3])})["digest"] == digests
    assert pickle.loads(pickle.dumps(index))._opened is None
    assert (tmp_path / "kv").is_dir()


def test_index_chunks_leaves_empty_documents_out_and_refuses_what_is_none(tmp_path, model_folder):
    index = IndexChunks(model_folder, tmp_path / "kv")
    first, empty, last = index({"text": ["Mara keeps the light.", " ", "Tomas repairs boats."]})["digest"]
    assert empty == ""
    assert len(first) == len(last) == 64
    with pytest.raises(PromptError, match="chunk 1 is None"):
        index({"text": ["Mara keeps the light.", None]})


def test_index_chunks_says_that_store_is_full(tmp_path):
    index = IndexChunks(load, {"location": tmp_path / "kv", "disk_bytes": 10}, column="ids")
    with pytest.raises(StoreError, match="did not keep a chunk"):
        index({"ids": IDS[:2]})
