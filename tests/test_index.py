# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus that is indexed by any number of processes, stopped anywhere and gone on with, gives the same bytes."""

import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from worlds import REFERENCE, reference_questions

from hf_blend import ChunkStore
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.documents import Document
from hf_blend.evaluation.indexing import Estimate, Indexer, Shard
from hf_blend.evaluation.retrieving import Splitter

CHUNK_TOKENS = 4
WHOLE = Shard()


@pytest.fixture(scope="module")
def source():
    return open_model(REFERENCE, device="cpu")


@pytest.fixture(scope="module")
def loaded(source):
    return source.load(), source.tokenizer


@pytest.fixture(scope="module")
def texts():
    return [text for one in reference_questions() for text in one["chunks"]][:6]


@pytest.fixture(scope="module")
def pieces(source, texts):
    return Splitter(source.tokenizer, CHUNK_TOKENS).split_all(Document("story", text) for text in texts)


def objects(folder: Path) -> dict[str, bytes]:
    paths = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def indexed(folder, loaded, pieces, shard=WHOLE, progress=iter):
    with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
        return Indexer(*loaded, store, pieces, shard).run(progress)


@pytest.fixture(scope="module")
def serial(tmp_path_factory, loaded, pieces):
    folder = tmp_path_factory.mktemp("serial")
    indexed(folder, loaded, pieces)
    return objects(folder)


@pytest.mark.parametrize("count", [2, 3])
def test_shards_in_any_order_and_repeated_give_the_bytes_of_a_serial_run(count, tmp_path, loaded, pieces, serial):
    done = [indexed(tmp_path, loaded, pieces, Shard(number, count)) for number in [*reversed(range(count)), 0]]
    assert objects(tmp_path) == serial
    assert sum(one.stored for one in done) == len(serial) > 10
    assert all(one.stored for one in done[:-1])
    assert done[-1].stored == 0
    assert done[-1].present == done[-2].stored


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, loaded, pieces, serial):
    def broken_off(keys):
        yield from itertools.islice(keys, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        indexed(tmp_path, loaded, pieces, progress=broken_off)
    found = len(objects(tmp_path))
    assert 0 < found < len(serial)
    assert indexed(tmp_path, loaded, pieces).stored == len(serial) - found
    assert objects(tmp_path) == serial


def test_what_it_takes_is_known_before_and_right_to_a_tenth(tmp_path, source, loaded, pieces):
    estimate = Estimate.of(pieces, source)
    with ChunkStore.open("memory://") as store:
        done = Indexer(*loaded, store, pieces).run()
        kept = [store.get(key) for key in Indexer(*loaded, store, pieces).keys]
    kv = sum(tensor.nbytes for chunk in kept for layer in chunk.layers for tensor in layer)
    assert estimate.pieces == done.chunks
    assert estimate.tokens == done.tokens
    assert estimate.nbytes == kv


@pytest.mark.usefixtures("small_smollm2")
def test_a_dry_run_says_what_it_takes_and_stores_nothing(tmp_path, run):
    code, out, err = run("index", "--store", tmp_path / "s", "--dry-run", "--json")
    assert not code
    assert set(json.loads(out)) == {"pieces", "tokens", "nbytes", "left_out"}
    assert "to compute, about" in err
    assert not (tmp_path / "s").exists()


class Rows:
    """A dataset of Ray whose actor is in this process."""

    def __init__(self, rows):
        self.rows = rows

    def map_batches(self, worker, fn_constructor_args, compute, **_):
        assert compute == 3
        actor = worker(*fn_constructor_args)
        columns = actor({"text": [one["text"] for one in self.rows]})
        actor.close()
        return Rows([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def take_all(self):
        print("what Ray has to say")
        return self.rows


@pytest.mark.usefixtures("small_smollm2")
def test_actors_of_ray_store_the_chunks_that_one_process_stores(tmp_path, run, monkeypatch):
    index = partial(run, "index", "--chunk-tokens", "64", "--json")
    data = SimpleNamespace(Dataset=Rows, from_items=Rows, ActorPoolStrategy=lambda size: size)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(data=data))
    monkeypatch.setitem(sys.modules, "ray.data", data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "team").mkdir()  # a namespace is no path
    code, out, err = index("--store", "actors", "--ray", "3", "--namespace", "team")
    found = json.loads(out)
    assert code == 0
    assert found["stored"] == found["chunks"]
    assert found["present"] == 0
    assert "what Ray has to say" in err
    assert json.loads(index("--store", "one", "--namespace", "team")[1]) == found
    assert {*objects(tmp_path / "actors")} == {*objects(tmp_path / "one")}
    code, out, err = index("--store", "actors", "--ray", "3", "--shard", "0/2")
    assert code == 2
    assert out == ""
    assert "--ray came with the shard 0/2" in err
    monkeypatch.setitem(sys.modules, "ray.data", None)
    code, out, err = index("--store", "actors", "--ray", "3")
    assert code == 2
    assert out == ""
    assert 'hf-blend index --ray needs ray.data, which is not installed: pip install "hf-blend[ray]"' in err


@pytest.mark.usefixtures("small_smollm2")
def test_a_store_that_was_indexed_with_another_model_is_said_to_be(tmp_path, run, model_folder):
    where = ("--store", tmp_path / "kv")
    other = ("--model", model_folder)
    line = f"The store's documents were indexed with smollm2; {model_folder}, as it is loaded now, finds none of"
    assert "indexed with" not in run("index", *where)[2]
    assert "indexed with" not in run("ask", *where, "--max-new-tokens", "1")[2]
    assert line in run("ask", *where, *other, "--max-new-tokens", "1")[2]
    assert line in run("index", *where, *other)[2]
    assert "indexed with" not in run("ask", *where, *other, "--max-new-tokens", "1")[2]
    models = {row["model"] for row in json.loads(run("store", "ls", "--chunks", *where, "--json")[1])}
    assert models == {"smollm2", model_folder}, "every chunk's, also of those that no document has"


@pytest.mark.usefixtures("small_smollm2")
def test_a_run_ends_in_a_sentence_and_its_figures_are_in_json(tmp_path, run):
    figures = json.loads(run("index", "--store", tmp_path / "one", "--json")[1])
    assert {"documents", "chunks", "tokens", "stored", "present", "refused", "evicted", "shard"} < {*figures}
    _, out, _ = run("index", "--store", tmp_path / "two")
    assert out == f"{figures['stored']} chunks were computed and stored, 0 were there before.\n"
    assert run("index", "--store", tmp_path / "two", "--dry-run")[1] == ""


@pytest.mark.usefixtures("small_smollm2")
def test_a_folder_that_was_indexed_at_another_size_is_found_and_a_mismatch_is_named(tmp_path, texts, run):
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (folder / "b.txt").write_text(texts[0], encoding="utf-8")

    def said(*words):
        _, out, err = run(*words, "--store", tmp_path / "kv", "--json")
        return json.loads(out), err

    assert said("index", str(folder), "--chunk-tokens", "16")[0]["stored"] > 4
    (folder / "new.txt").write_text(texts[1], encoding="utf-8")  # indexed at no size
    for path in (folder, folder / "a.txt"):
        found, err = said("ask", texts[0], str(path), "--top-k", "0")
        assert found["chunks"]["loaded"] > 4
        assert found["chunks"]["computed"] <= 2  # what is new, and the beginning of the prompt
        assert "--chunk-tokens" not in err
    found, err = said("ask", texts[0], str(folder), "--chunk-tokens", "512", "--top-k", "0")
    assert "were indexed with --chunk-tokens 16, not 512" in err
    assert found["chunks"]["computed"] >= 1


def launched(corpus: Path, store: Path, processes: int) -> subprocess.Popen:
    command = [sys.executable, "-P", "-m", "accelerate.commands.launch"]
    command += ["--multi_gpu", "--num_processes", str(processes), "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--num_machines", "1", "--main_process_port", "0"] if processes > 1 else []
    command = command if processes > 1 else [sys.executable, "-P"]
    command += ["-m", "hf_blend.cli.main", "index", str(corpus), "--store", str(store), "--chunk-tokens", "16"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **quiet)


def worker(launcher: subprocess.Popen, rank: str) -> psutil.Process | None:
    for child in psutil.Process(launcher.pid).children(recursive=True):
        try:
            if child.environ().get("RANK") == rank and "index" in child.cmdline():
                return child
        except psutil.Error:
            continue
    return None


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_and_a_second_run_give_the_bytes_of_a_serial_run(tmp_path, texts):
    corpus = tmp_path / "corpus.jsonl"
    mixed = (" ".join(some).replace("\n", "") for some in itertools.permutations(texts, 4))
    corpus.write_text("".join(json.dumps(text) + "\n" for text in mixed))
    alone = launched(corpus, tmp_path / "serial", 1)
    assert alone.wait(300) == 0, alone.stderr.read()
    wanted = objects(tmp_path / "serial")

    shared = tmp_path / "shared"
    both = launched(corpus, shared, 2)
    for _ in range(3000):
        if len(list(shared.rglob("*.safetensors"))) > 20 or both.poll() is not None:
            break
        time.sleep(0.02)
    assert both.poll() is None, both.stderr.read()
    victim = worker(both, "1")
    assert victim is not None, "the second process ended too early"
    victim.kill()
    assert both.wait(300) != 0
    killed_at = len(objects(shared))
    assert 20 < killed_at < len(wanted)

    again = launched(corpus, shared, 2)
    assert again.wait(300) == 0, again.stderr.read()
    assert objects(shared) == wanted
