# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A long document is computed once and asked many times."""

import pytest

from hf_blend import ChunkStore, ConfigError
from hf_blend.context.document import Document

TEXT = (
    "Mara keeps a goat.\nShe lives in Velden.\nThe market opens at noon.\nAll was quiet until morning.\n"
    "Tomas keeps a dog.\nHe lives in Lomond.\nThe road was long and empty.\n"
)


@pytest.fixture
def document(reference):
    return Document(*reference, ChunkStore.open("memory://"), TEXT, chunk_tokens=12, recompute_ratio=1.0)


def test_chunks_are_whole_lines_or_cut_where_these_are_too_long_and_together_the_text(document, reference):
    texts = [reference[1].decode(ids) for ids in document.chunks]
    assert all(len(ids) <= 12 for ids in document.chunks)
    assert all(text.endswith("\n") for text in texts)
    assert sum(document.chunks, ()) == tuple(reference[1](TEXT, add_special_tokens=False)["input_ids"])
    line = TEXT.replace("\n", " ")
    document = Document(*reference, ChunkStore.open("memory://"), line, chunk_tokens=5)
    assert max(map(len, document.chunks)) == 5
    assert sum(document.chunks, ()) == tuple(reference[1](line, add_special_tokens=False)["input_ids"])


def test_chunks_are_computed_once(document):
    seen = []
    assert document.precompute(lambda items: [seen.append(item) or item for item in items]) == len(document.chunks)
    assert seen == document.chunks
    stored = document.store.stats()["stored"]
    assert len(document.store) == len(set(document.chunks))
    document.precompute()
    assert document.store.stats()["stored"] == stored


def test_ask_reads_the_whole_document_or_what_a_retriever_picks(document):
    assert document.ask("Where does Mara live?", max_new_tokens=2) == "Velden"
    assert document.ask("Where does Tomas live?", max_new_tokens=2) == "Lomond"
    asked = []

    def retrieve(question, texts):
        asked.append(question)
        return [place for place, text in enumerate(texts) if "Tomas" in text or "Lomond" in text]

    assert document.ask("Where does Tomas live?", retrieve=retrieve, max_new_tokens=2) == "Lomond"
    assert asked == ["Where does Tomas live?"]


@pytest.mark.parametrize("picked", [[], [99], [-1]])
def test_a_retriever_that_picks_nothing_that_exists_is_refused(document, picked):
    with pytest.raises(ConfigError, match="picked"):
        document.ask("Where?", retrieve=lambda *_: picked)


def test_an_empty_document_is_refused(reference):
    with pytest.raises(ConfigError, match="above 0"):
        Document(*reference, ChunkStore.open("memory://"), "")
