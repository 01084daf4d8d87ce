# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A dataset is indexed by several processes or actors of Ray, each chunk once, also after some or all were killed.

What was computed is counted by lines in a file that `compute_chunks` itself leaves, whatever the store says.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from functools import wraps
from random import Random

import numpy as np
import pandas
import pytest
import torch
from filelock import FileLock
from tiny_models import tiny_model as zoo_model
from worlds import REFERENCE

from hf_blend import ChunkStore, ConfigError, HfBlendError, StoreError
from hf_blend.integrations.datasets import index_dataset
from hf_blend.integrations.indexing import STRIPES
from hf_blend.integrations.ray import IndexChunks, index_ray_dataset

datasets = pytest.importorskip("datasets")

UNLIKE = 100
DRAW = Random(3)
IDS = 2 * [[DRAW.randrange(3, 120) for _ in range(8)] for _ in range(UNLIKE)]  # two processes meet at each of them


class Counted:
    """Makes the model in a process that indexes, where each forward then leaves a line: process, digests."""

    def __init__(self, path):
        self.path = path

    def __call__(self):
        from hf_blend.model import canary

        compute = getattr(canary.compute_chunks, "__wrapped__", canary.compute_chunks)

        @wraps(compute)
        def counting(model, keys, *given, **more):
            chunks = compute(model, keys, *given, **more)
            with open(self.path, "a") as file:
                file.write(" ".join([str(os.getpid()), *(key.digest for key in keys)]) + "\n")
            return chunks

        canary.compute_chunks = counting
        return zoo_model("llama"), None


def in_a_child(rows, counted, location, processes):
    """A process of its own with children of its own; gives its id."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        torch.set_num_threads(1)
        index_dataset(rows, counted, {"location": location, "durability": "none"}, column="ids", num_proc=processes,
                      batch_rows=8)  # fmt: skip
        os._exit(0)
    finally:
        os._exit(1)


def lines(path):
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def count(path):
    """How often each chunk was computed."""
    return Counter(digest for _, *digests in lines(path) for digest in digests)


def last_of_each(path):
    """What each process computed last, in one forward: stored or not when it is killed."""
    return {process: digests for process, *digests in lines(path)}


def test_each_chunk_is_computed_once_by_two_processes_and_a_kill_costs_what_was_under_way(tmp_path):
    counter, location, rows = tmp_path / "counted", tmp_path / "kv", datasets.Dataset.from_dict({"ids": IDS})
    child = in_a_child(rows, Counted(counter), location, 2)
    while len(count(counter)) < 30:
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(count(counter)) < UNLIKE, "the kill was meant to come in the middle"
    under_way = {digest for digests in last_of_each(counter).values() for digest in digests}
    assert os.waitpid(in_a_child(rows, Counted(counter), location, 2), 0)[1] == 0
    computed = count(counter)
    assert len(computed) == UNLIKE
    assert {digest for digest, times in computed.items() if times > 1} <= under_way
    assert max(computed.values()) <= 2
    with ChunkStore.open(location, memory_bytes=0) as store:
        assert {one.digest for one in store.entries()} == set(computed)
        assert not [found for found in store.check() if found.reason]
    found = index_dataset(rows, lambda: (zoo_model("llama"), None), location, column="ids")
    assert set(found["state"]) == {"present"}
    assert set(found["digest"]) == set(computed)


def test_one_process_says_what_it_did_and_a_store_that_is_too_small_is_an_error(tmp_path):
    rows = datasets.Dataset.from_dict({"ids": [[5, 6, 7], [8, 9, 10], [5, 6, 7]], "title": ["a", "b", "c"]})
    found = index_dataset(rows, Counted(tmp_path / "counted"), tmp_path / "kv", column="ids")
    assert found["state"] == ["computed", "computed", "present"]
    assert found.column_names == ["digest", "state"]
    small = {"location": tmp_path / "small", "disk_bytes": 10}
    with pytest.raises(StoreError, match="did not keep 3 of 3 chunks"):
        index_dataset(rows, Counted(tmp_path / "counted"), small, column="ids")


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [
        ([[5, 6]], {"column": "nope"}, "no column 'nope'.*text"),
        ([[5, 6]], {"num_proc": "2"}, "num_proc is '2', expected a whole number from 0 on"),
        ([[5, 6]], {"num_proc": -1}, "num_proc is -1"),
        ([[5, 6]], {"batch_rows": 0}, "batch_rows is 0, expected a whole number from 1 on"),
        ([[5, 6]], {"threads": 0}, "threads is 0"),
        ([[5, 6], None], {}, "chunk 1 is None, expected a text, .* or token ids"),
        ([[5.5, 6.5]], {}, "expected text or token ids: 'float' object"),
        ([[5, 6], []], {}, "chunk 1 is .* and has no token"),
        (["five"], {}, "'five' came without a tokenizer"),
    ],
)
def test_what_is_no_chunk_is_refused_by_name(tmp_path, rows, given, message):
    dataset = datasets.Dataset.from_dict({"text": rows})
    with pytest.raises(HfBlendError, match=message):
        index_dataset(dataset, lambda: (zoo_model("llama"), None), tmp_path / "kv", **given)


def test_datasets_of_other_kinds_are_refused_and_one_without_rows_is_none(tmp_path):
    rows = datasets.Dataset.from_dict({"text": [[5, 6]]})
    for other in (datasets.DatasetDict(train=rows), rows.to_iterable_dataset(), [{"text": [5, 6]}]):
        with pytest.raises(ConfigError, match=r"expected a datasets\.Dataset"):
            index_dataset(other, "no model", tmp_path / "kv")
    found = index_dataset(rows.select([]), "no model", tmp_path / "kv")
    assert (len(found), found.column_names) == (0, ["digest", "state"])


def test_texts_are_chunks_as_in_any_other_way_of_indexing(tmp_path):
    from hf_blend.evaluation.bundled import load_model

    texts = ["The miller carries flour.\n", "The keeper lights the lamp.\n"]
    index_dataset(datasets.Dataset.from_dict({"text": texts}), REFERENCE, tmp_path / "kv")
    model, tokenizer = load_model(REFERENCE)
    with ChunkStore.open(tmp_path / "kv") as store:
        assert all(store.contains(key) for key in store.keys(model, tokenizer, texts))


@pytest.mark.parametrize(
    "column", [np.array([[5, 6, 7], [8, 9, 10], [5, 6, 7]]), pandas.DataFrame({"ids": [[5, 6, 7], np.array([8, 9, 10]),
     [5, 6, 7]]})["ids"], [[5, 6, 7], (8, 9, 10), [5, 6, 7]]], ids=["numpy", "pandas", "lists"],
)  # fmt: skip
def test_a_batch_of_any_kind_is_stored_each_chunk_once(tmp_path, column):
    worker = pickle.loads(pickle.dumps(IndexChunks(Counted(tmp_path / "counted"), tmp_path / "kv", "ids")))
    found = worker({"ids": column})
    assert found["state"] == ["computed", "computed", "present"]
    assert set(worker({"ids": column})["state"]) == {"present"}
    worker.close()
    with ChunkStore.open(tmp_path / "kv", memory_bytes=0) as store:
        assert [one.digest for one in store.entries()] == sorted({*found["digest"]})


def test_a_batch_is_computed_in_one_forward_but_for_what_others_are_computing(tmp_path):
    counter, rows = tmp_path / "counted", [[5, 6, 7], [8, 9, 10], [5, 7, 9]]
    worker = IndexChunks(Counted(counter), tmp_path / "kv", "ids")
    assert worker({"ids": [[3, 4]]})["state"] == ["computed"]
    with ChunkStore.open(tmp_path / "kv") as store:
        first = store.keys(*Counted(counter)(), rows)[0].digest
    found, thread = [], threading.Thread(target=lambda: found.append(worker({"ids": rows})))
    with FileLock(tmp_path / "kv" / "claims" / f"{first[:STRIPES]}.lock"):
        thread.start()
        while len(lines(counter)) < 2 and thread.is_alive():
            thread.join(0.01)
        assert [len(digests) for _, *digests in lines(counter)] == [1, 2]
        assert first not in count(counter)
    thread.join()
    assert found[0]["state"] == ["computed"] * 3
    assert [digests for _, *digests in lines(counter)][2:] == [[first]]


def test_what_the_store_does_not_keep_is_refused(tmp_path):
    worker = IndexChunks(Counted(tmp_path / "counted"), {"location": tmp_path / "small", "disk_bytes": 10}, "ids")
    assert worker({"ids": [[5, 6, 7]]})["state"] == ["refused"]


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "hf-blend[ray]"')
    pytest.importorskip("ray.data")
    found_by_actors = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=found_by_actors)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_each_chunk_is_computed_once_by_two_actors_of_which_one_is_killed(tmp_path, ray):
    counter, location, killed = tmp_path / "counted", tmp_path / "kv", []

    def kill():
        while len(count(counter)) < 30:
            time.sleep(0.05)
        process = int(lines(counter)[-1][0])
        os.kill(process, signal.SIGKILL)
        killed.append(process)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    rows = ray.data.from_items([{"ids": ids} for ids in IDS])
    settings = {"location": str(location), "durability": "none"}
    found = index_ray_dataset(rows, Counted(counter), settings, column="ids", actors=2, batch_rows=8)
    killer.join()
    computed = count(counter)
    assert len(found) == len(IDS)
    assert len(computed) == UNLIKE
    assert len({process for process, *_ in lines(counter)}) >= 2
    assert {digest for digest, times in computed.items() if times > 1} <= {*last_of_each(counter)[str(killed[0])]}
    assert max(computed.values()) <= 2
    with ChunkStore.open(location, memory_bytes=0) as store:
        assert {one.digest for one in store.entries()} == set(computed)
        assert not [found for found in store.check() if found.reason]


@pytest.mark.slow
def test_a_store_that_is_too_small_and_a_dataset_of_another_kind_are_errors(tmp_path, ray):
    rows = ray.data.from_items([{"ids": [5, 6, 7]}])
    with pytest.raises(StoreError, match="did not keep 1 of 1 chunks"):
        index_ray_dataset(
            rows, Counted(tmp_path / "counted"), {"location": str(tmp_path / "small"), "disk_bytes": 10}, column="ids"
        )
    with pytest.raises(ConfigError, match=r"expected a ray\.data\.Dataset"):
        index_ray_dataset([{"ids": [5, 6, 7]}], Counted(tmp_path / "counted"), tmp_path / "kv", column="ids")
