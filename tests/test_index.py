# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A corpus that is indexed by any number of processes, stopped anywhere and gone on with, gives the same bytes."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hf_blend import ChunkStore
from hf_blend.cli.main import main
from hf_blend.errors import ConfigError, PromptError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.indexing import Corpus, Shard, index

CHUNK_TOKENS = 4
WHOLE = Shard()


@pytest.fixture(scope="module")
def reference():
    return load_model()


@pytest.fixture(scope="module")
def texts():
    return list(Corpus([]))[:6]


def objects(folder: Path) -> dict[str, bytes]:
    paths = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def run(folder, reference, texts, shard=WHOLE):
    with ChunkStore.open(folder, memory_bytes=0, durability="none") as store:
        return index(*reference, store, texts, CHUNK_TOKENS, shard)


@pytest.fixture(scope="module")
def serial(tmp_path_factory, reference, texts):
    folder = tmp_path_factory.mktemp("serial")
    run(folder, reference, texts)
    return objects(folder)


def test_indexing_again_computes_nothing(tmp_path, reference, texts):
    first = run(tmp_path, reference, texts)
    before = objects(tmp_path)
    again = run(tmp_path, reference, texts)
    assert first.stored == len(before) > 10
    assert (again.stored, again.present) == (0, again.chunks)
    assert objects(tmp_path) == before


@pytest.mark.parametrize("count", [2, 3])
def test_shards_in_any_order_and_repeated_give_the_bytes_of_a_serial_run(count, tmp_path, reference, texts, serial):
    done = [run(tmp_path, reference, texts, Shard(number, count)) for number in [*reversed(range(count)), 0]]
    assert objects(tmp_path) == serial
    assert sum(one.stored for one in done) == len(serial)
    assert all(one.stored for one in done[:-1])
    assert done[-1].stored == 0


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, reference, texts, serial):
    def broken_off():
        yield from texts[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, reference, broken_off())
    found = len(objects(tmp_path))
    assert 0 < found < len(serial)
    assert run(tmp_path, reference, texts).stored == len(serial) - found
    assert objects(tmp_path) == serial


def test_a_store_that_keeps_nothing_is_noticed(tmp_path, reference, texts):
    with ChunkStore.open(tmp_path, memory_bytes=0, disk_bytes=10) as store:
        done = index(*reference, store, texts[:1], CHUNK_TOKENS)
    assert done.refused > 0 == done.stored


def test_a_corpus_is_files_folders_and_lines(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "sub" / "a.md").write_text("three")
    (tmp_path / "x.jsonl").write_text('"four"\n\n{"text": "five", "id": 3}\n')
    (tmp_path / "no.bin").write_bytes(b"\xff")
    corpus = Corpus([str(tmp_path / "b.txt"), str(tmp_path)])
    assert list(corpus) == ["two", "two", "three", "four", "five"]
    assert len(corpus) == 5


@pytest.mark.parametrize(
    ("content", "says"), [('{"body": 1}', r"x\.jsonl:1 is.*field 'text'"), ("{", r"x\.jsonl:1 is not JSON")]
)
def test_a_line_that_is_no_document_is_named(content, says, tmp_path):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(PromptError, match=says):
        list(Corpus([str(tmp_path / "x.jsonl")]))


def test_a_corpus_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PromptError, match="no file or folder"):
        Corpus([str(tmp_path / "none")])
    with pytest.raises(PromptError, match="no file in"):
        Corpus([str(tmp_path)])


@pytest.mark.parametrize("text", ["2/2", "a/b", "1", "-1/2", "0/0"])
def test_a_shard_that_cannot_be_is_refused(text):
    with pytest.raises(ConfigError, match="NUMBER/COUNT"):
        Shard.find(text)


def test_the_launcher_says_which_shard(monkeypatch):
    assert Shard.find() == Shard(0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Shard.find() == Shard(1, 3)


def test_what_was_indexed_is_found_when_a_question_is_asked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["index", "--store", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["stored"] > 0
    with pytest.raises(SystemExit):
        main(["ask", "--store", str(tmp_path), "--json"])
    chunks = json.loads(capsys.readouterr().out)["chunks"]
    assert chunks["computed"] < chunks["loaded"]


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
