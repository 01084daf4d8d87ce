# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Names of documents lie beside the chunks: one entry for each document and model; none with a secret."""

import json

import pytest

from hf_blend import ChunkStore
from hf_blend.evaluation.sources import Source, Sources

OLD = Source("notes/a.md", "/somewhere/notes/a.md", "mine", "f" * 64, 512, 1.0, ("1" * 64, "2" * 64))
OTHER = Source("notes/b.md", "/somewhere/notes/b.md", "mine", "f" * 64, 512, 2.0, ("2" * 64, "3" * 64))


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "kv") as opened:
        yield opened


def test_what_is_written_down_is_read_back_by_another_process(store, tmp_path):
    Sources(store).add([OTHER, OLD])
    with ChunkStore.open(tmp_path / "kv") as again:
        assert list(Sources(again)) == [OLD, OTHER]


def test_indexing_a_document_again_replaces_its_entry(store):
    new = Source(OLD.name, OLD.path, "mine", OLD.fingerprint, 256, 3.0, ("4" * 64,))
    other_model = Source(OLD.name, OLD.path, "yours", "e" * 64, 256, 3.0, ("5" * 64,))
    Sources(store).add([OLD])
    Sources(store).add([new, other_model])
    assert list(Sources(store)) == [new, other_model]


def test_a_chunk_that_another_document_has_too_stays(store):
    Sources(store).add([OLD, OTHER])
    assert Sources(store).remove([OLD]) == ["1" * 64]
    assert list(Sources(store)) == [OTHER]
    assert Sources(store).remove([OTHER]) == ["2" * 64, "3" * 64]


@pytest.mark.parametrize(
    ("name", "found"),
    [("notes/a.md", [OLD]), ("notes", [OLD, OTHER]), ("notes/", [OLD, OTHER]), (OLD.path, [OLD]), ("note", [])],
)
def test_a_document_is_found_by_name_path_and_folder(store, name, found):
    Sources(store).add([OLD, OTHER])
    assert Sources(store).named(name) == found


def test_a_store_with_a_secret_or_without_a_folder_keeps_no_names(tmp_path, store):
    for location, secret in ((tmp_path / "s", b"secret"), ("memory://", None)):
        with ChunkStore.open(location, secret=secret) as opened:
            Sources(opened).add([OLD])
            assert list(Sources(opened)) == []
    assert not (tmp_path / "s" / "sources").exists()
    Sources(store).add([OLD])
    with ChunkStore.open(tmp_path / "kv", namespace="other") as opened:
        assert list(Sources(opened)) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "hf_blend.source/1"}', json.dumps({"format": "other"})])
def test_a_damaged_entry_is_passed_over(store, tmp_path, text):
    Sources(store).add([OLD, OTHER])
    path = next(path for path in tmp_path.rglob("*.json") if "a.md" in path.read_text())
    path.write_text(text)
    assert list(Sources(store)) == [OTHER]
