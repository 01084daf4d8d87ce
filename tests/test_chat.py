# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation over documents: each turn is the prompt that a full prefill would get, and loads what is stored."""

import io
import json

import pytest
import torch

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.evaluation.answering import Turn
from hf_blend.evaluation.asking import Chat
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.retrieving import Piece, Retriever

pytest.importorskip("bm25s", reason="the extra rag is not installed: pip install hf-blend[rag]")

TEXTS = {"a.txt": "Mara keeps the light.\n", "b.txt": "Tomas repairs boats.\n", "c.txt": "The mill is old.\n"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def source(model_folder):
    return open_model(model_folder, device="cpu")


@pytest.fixture(scope="module")
def model(source):
    return source.load()


@pytest.fixture
def make(source, model):
    """Make a chat over three documents, with or without a template; everything is computed, so that it is exact."""

    def made(top_k=2, template=None, new_tokens=4, **settings):
        encode = source.tokenizer.encode
        found = [Piece(name, 0, text, tuple(encode(text, add_special_tokens=False))) for name, text in TEXTS.items()]
        source.tokenizer.chat_template = template
        store = ChunkStore.open("memory://")
        return Chat(model, source, store, Retriever(found, top_k), BlendConfig(recompute_ratio=1.0),
                    max_new_tokens=new_tokens, **settings)  # fmt: skip

    return made


@pytest.mark.parametrize("template", [None, CHATML])
def test_an_answer_in_any_turn_is_that_of_a_full_prefill_of_the_same_prompt(make, source, model, template):
    talk = make(template=template)
    for question in ("Who keeps the light?", "Who repairs boats?"):
        asked = talk.prepare(question)
        got = talk.answer(asked)
        ids = got.input_ids[None]
        full = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        text = source.tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True).strip()
        assert got.text == text
    assert [turn.question for turn in talk.turns] == ["Who keeps the light?", "Who repairs boats?"]


def test_as_many_pieces_are_read_as_are_asked_for_and_the_model_has_room_for(make):
    assert make(top_k=2).prepare("light and boats?").names == ["b.txt", "a.txt"]
    crowded = make(top_k=0, new_tokens=1998)  # of 2048 positions
    asked = crowded.prepare("Who?")
    assert (len(asked.sources), asked.squeezed_out) == (2, 1)


def test_documents_are_retrieved_for_each_turn_and_computed_once(make):
    talk = make(top_k=1)
    asks = [talk.prepare(question) for question in ("light?",)]
    assert asks[0].names == ["a.txt"]
    first = talk.answer(asks[0])
    boats = talk.prepare("Who repairs boats?")
    assert boats.names == ["b.txt"]
    second = talk.answer(boats)
    third = talk.answer(talk.prepare("Tomas and boats?"))
    assert first.report.computed_chunks > 0
    assert second.report.computed_chunks == 1  # the document alone: what stands before it was stored in the first turn
    assert third.report.computed_chunks == 0


def test_fixed_documents_stay_those_of_the_first_turn(make):
    talk = make(top_k=1, is_fixed=True)
    talk.answer(talk.prepare("light?"))
    assert talk.prepare("Who repairs boats?").names == ["a.txt"]


def test_what_was_said_is_never_stored(make):
    talk = make()
    for number in range(3):
        talk.answer(talk.prepare(f"Who keeps the light, number {number}?"))
    assert len(talk.store) <= 1 + len(TEXTS)


def test_the_oldest_turns_leave_when_there_is_no_room(make):
    talk = make(new_tokens=1000)
    talk.turns += [Turn("a" * 600, "b" * 600), Turn("c", "d")]
    asked = talk.prepare("Who?")
    assert [turn.question for turn in talk.turns] == ["c"]
    assert asked.sources


def test_the_command_streams_answers_names_sources_and_ends(tmp_path, monkeypatch, run, model_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_text(text)
    lines = "Who keeps the light?\n/sources\n/nonsense\n\n/reset\nAnd boats?\n/quit\nnever asked\n"
    words = ["chat", "docs", "--model", model_folder, "--store", "kv", "--max-new-tokens", "3", "--top-k", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, err = run(*words)
    assert not code, err
    assert out.count("Sources: ") == 2
    assert "docs/a.txt, characters 0 to 22" in err
    assert "There is no /nonsense." in err
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    rows = json.loads(run(*words, "--json")[1])["rows"]
    assert [row["question"] for row in rows] == ["Who keeps the light?", "And boats?"]
    assert [row["chunks"]["computed"] for row in rows] == [0, 0]
