# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus whose indexing is stopped anywhere and run again gives the same bytes."""

import itertools
import json

import pytest
from worlds import REFERENCE, reference_questions

from hf_blend import ChunkStore
from hf_blend.errors import StoreError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.documents import Document
from hf_blend.evaluation.indexing import Indexer
from hf_blend.evaluation.retrieving import Splitter
from tests.asking import memory


@pytest.fixture(scope="module")
def loaded():
    return load_model(REFERENCE)


@pytest.fixture(scope="module")
def texts():
    return [text for row in reference_questions() for text in row["chunks"]][:6]


@pytest.fixture(scope="module")
def pieces(loaded, texts):
    return Splitter(loaded[1], 4).split_all(Document("story", text) for text in texts)


def objects(folder):
    """The bytes of every stored chunk, by name."""
    paths = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def index(folder, loaded, pieces, progress=iter):
    with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
        return Indexer(*loaded, store, pieces).run(progress)


@pytest.fixture(scope="module")
def serial(tmp_path_factory, loaded, pieces):
    folder = tmp_path_factory.mktemp("serial")
    index(folder, loaded, pieces)
    return objects(folder)


def test_indexer_that_was_stopped_continues_where_it_was(tmp_path, loaded, pieces, serial):
    def stop(keys):
        yield from itertools.islice(keys, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index(tmp_path, loaded, pieces, progress=stop)
    stored = len(objects(tmp_path))
    assert 0 < stored < len(serial)
    assert index(tmp_path, loaded, pieces).stored == len(serial) - stored
    assert objects(tmp_path) == serial


def test_indexer_knows_bytes_and_refuses_store_that_is_too_small(tmp_path, loaded, pieces):
    with memory() as store:
        indexer = Indexer(*loaded, store, pieces)
        indexer.run()
        keys = store.keys(*loaded, [piece.prompt_text for piece in pieces])
        chunks = [store.get(key) for key in dict.fromkeys(keys)]
    assert indexer.nbytes == sum(tensor.nbytes for chunk in chunks for layer in chunk.layers for tensor in layer)
    with ChunkStore.open(tmp_path, memory_bytes=0, disk_bytes=10) as store:
        indexer = Indexer(*loaded, store, pieces[:2])
        with pytest.raises(StoreError, match="GB"):
            indexer.check_room()
        assert indexer.run().refused > 0


@pytest.mark.usefixtures("small_smollm2")
def test_index_command_estimates_stores_and_names_what_ask_then_loads(tmp_path, run):
    where = ("--store", tmp_path / "kv")
    code, out, err = run("index", *where, "--dry-run", "--json")
    assert not code
    assert json.loads(out).keys() == {"pieces", "tokens", "nbytes", "left_out"}
    assert "to compute, about" in err
    assert not (tmp_path / "kv").exists()
    figures = json.loads(run("index", *where, "--json")[1])
    assert {"documents", "chunks", "tokens", "stored", "present", "refused", "evicted"} < figures.keys()
    _, out, _ = run("index", *where)
    assert out == f"0 chunks were computed and stored, {figures['stored']} were there before.\n"
    chunks = json.loads(run("ask", *where, "--json")[1])["chunks"]
    assert chunks["computed"] < chunks["loaded"]


@pytest.mark.usefixtures("small_smollm2")
def test_load_says_that_store_has_chunks_of_other_models_only(tmp_path, run, model_folder):
    where = ("--store", tmp_path / "kv")
    ask_other = ("ask", *where, "--max-new-tokens", "1", "--model", model_folder)
    line = f"chunks are of other models; {model_folder}, as it is loaded now, finds none"
    assert "of other models" not in run("index", *where)[2]
    assert line in run(*ask_other)[2]
    run("index", *where, "--model", model_folder)
    assert line not in run(*ask_other)[2]
