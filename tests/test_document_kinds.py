# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a document is does not depend on where it comes in: its text is the same, and the same things are refused.

A door is given documents and gives back what it made of them; what it makes of plain texts is what is expected.
"""

import copy
import json
import logging
import os
import unicodedata

import numpy as np
import pytest
import torch

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.errors import HfBlendError, PromptError
from hf_blend.evaluation.documents import Corpus
from hf_blend.integrations.answering import Answerer
from hf_blend.integrations.indexing import IndexChunks
from tests.chat_templates import CHATML, COMMAND_R, DOCUMENTS, QUESTION, small_tokenizer

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
langchain = pytest.importorskip("hf_blend.integrations.langchain", reason="pip install hf-blend[langchain]")
llamaindex = pytest.importorskip("hf_blend.integrations.llamaindex", reason="pip install hf-blend[llamaindex]")
haystack = pytest.importorskip("hf_blend.integrations.haystack", reason="pip install hf-blend[haystack]")

NEW = {"max_new_tokens": 2, "eos_token_id": None}
EVERYTHING = BlendConfig(recompute_ratio=1.0)
LONG = "A heading that is longer than any page of this collection, for all that it says about its harbours. " * 9
TEXT, OTHER = DOCUMENTS[0], DOCUMENTS[1]
PAGES = [f"Page {number}: the harbour of Lund." for number in range(11)]
JOINED = "\n\n".join([*PAGES, *DOCUMENTS])
ASKED = [{"role": "user", "content": QUESTION}]


def langchain_document(text):
    from langchain_core.documents import Document

    return Document(page_content=text, metadata={"source": LONG, "text": LONG})


def node(text):
    from llama_index.core.schema import TextNode

    return TextNode(text=text, excluded_llm_metadata_keys=["file_path"], metadata={"file_path": LONG})


def scored(text):
    from llama_index.core.schema import NodeWithScore

    return NodeWithScore(node=node(text), score=0.5)


def haystack_document(text):
    from haystack import Document

    return Document(content=text, meta={"file_path": LONG, "text": LONG})


JSON_KINDS = {
    "text": lambda text: text,
    "text of a dict": lambda text: {"doc_id": LONG, "text": text, "source": LONG, "title": None},
    "content of a dict": lambda text: {"id": LONG, "content": text, "meta": {"text": LONG}},
    "page_content of a dict": lambda text: {"metadata": {"source": LONG}, "page_content": text},
    "the first of three": lambda text: {"page_content": LONG, "content": LONG, "text": text},
    "the first that is not null": lambda text: {"text": None, "page_content": LONG, "content": text},
}
KINDS = {
    **JSON_KINDS,
    "a text of numpy": np.str_,
    "langchain": langchain_document,
    "llamaindex": node,
    "llamaindex with a score": scored,
    "haystack": haystack_document,
}
BAD = {
    "bytes": b"the",
    "a byte array": bytearray(b"the"),
    "nothing": None,
    "a number": 5,
    "no field with text": {"title": LONG, "body": LONG},
    "a number as text": {"text": 5, "content": LONG},
    "a number as title": {"title": 5, "text": "the"},
    "bytes as text": {"text": b"the"},
    "a list as text": {"text": ["the"]},
    "a class": str,
}
EMPTY = {"a text": " \n", "a dict": {"text": "", "title": LONG}, "null": {"content": None}, "a node": node(" "),
         "a page of langchain": langchain_document(""), "a page of haystack": haystack_document(None)}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    made = copy.deepcopy(small_tokenizer("spaces"))
    made.chat_template = CHATML
    return made


@pytest.fixture
def asker(shared_model, tokenizer):
    model = shared_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    return model, tokenizer, ChunkStore.open("memory://")


def prompt_of(inputs):
    return inputs["input_ids"].tolist()


def inputs(model, tokenizer, store, documents):
    return prompt_of(BlendCache(model, store).inputs(tokenizer, chunks=documents, question=QUESTION))


def batch(model, tokenizer, store, documents):
    return prompt_of(BlendCache(model, store).inputs(tokenizer, chunks=[documents], question=[QUESTION]))


def computed(model, store, make):
    """The prompt, and the chunks that answering it stores."""
    cache = BlendCache(model, store, EVERYTHING)
    given = make(cache)
    model.generate(**given, past_key_values=cache, do_sample=False, **NEW)
    return prompt_of(given), sorted(entry.digest for entry in store.entries())


def messages(model, tokenizer, store, documents):
    said = [{"role": "user", "content": f"{JOINED}\n\n{QUESTION}"}]
    return computed(model, store, lambda cache: cache.inputs_from_messages(tokenizer, said, documents))


def plain_text(model, tokenizer, store, documents):
    return computed(model, store, lambda cache: cache.inputs_from_text(tokenizer, JOINED, documents))


def added(model, tokenizer, store, documents):
    keys = store.add(model, tokenizer, documents)
    assert store.keys(model, tokenizer, documents) == keys
    return [key.digest for key in keys]


def answered(answer):
    return answer.text, answer.prompt_tokens, answer.report["computed_chunks"]


def chat(model, tokenizer, store, documents):
    return answered(Answerer(model, tokenizer, store, EVERYTHING, NEW).chat(ASKED, documents).whole())


def completed(model, tokenizer, store, documents):
    return answered(Answerer(model, tokenizer, store, EVERYTHING, NEW).complete(QUESTION, documents).whole())


def chat_blend(model, tokenizer, store, documents):
    llm = langchain.ChatBlend(model=model, tokenizer=tokenizer, store=store, blend=EVERYTHING, settings=NEW)
    answer = llm.invoke(QUESTION, documents=documents)
    return answer.content, answer.usage_metadata


def blend_llm(model, tokenizer, store, documents):
    llm = llamaindex.BlendLLM(model=model, tokenizer=tokenizer, store=store, blend=EVERYTHING, settings=NEW)
    return llm.complete(QUESTION, documents=documents).raw["usage"]


def generator(model, tokenizer, store, documents):
    from haystack.dataclasses import ChatMessage

    llm = haystack.BlendChatGenerator(model, tokenizer, store, EVERYTHING, NEW)
    (reply,) = llm.run([ChatMessage.from_user(QUESTION)], documents)["replies"]
    return reply.text, reply.meta["usage"]


def rows(model, tokenizer, store, documents):
    return IndexChunks(lambda: (model, tokenizer), "memory://")({"text": documents})


NAMED = [inputs, batch, messages, plain_text, added]  # an empty one among others is refused
MANY = [chat, completed, chat_blend, blend_llm, generator]  # it is left out


def check_same(door, asker, documents, texts):
    """A door makes of documents what it makes of these texts; each is another, or one might stand for all."""
    got, expected = (door(*asker[:2], ChunkStore.open("memory://"), [*given, OTHER]) for given in (documents, texts))
    assert got == expected


@pytest.mark.parametrize("door", [*NAMED, *MANY, rows])
def test_a_document_of_any_kind_is_its_text_at_every_door(door, asker):
    texts = PAGES[: len(KINDS)]
    check_same(door, asker, [make(text) for make, text in zip(KINDS.values(), texts, strict=True)], texts)


@pytest.mark.parametrize("door", [*NAMED, *MANY, rows])
def test_the_title_of_a_dict_stands_before_its_text_at_every_door_unless_the_prompt_lacks_it(door, asker):
    before = "" if door in (messages, plain_text) else "Mile 5\n\n"
    fields = zip(("text", "content", "page_content"), PAGES[:3], strict=True)
    documents = [{"title": "Mile 5", field: text} for field, text in fields]
    check_same(
        door, asker, [*documents, {"title": " ", "text": TEXT}], [*(f"{before}{text}" for text in PAGES[:3]), TEXT]
    )


def test_texts_of_is_what_the_messages_have(asker):
    model, tokenizer, store = asker
    titled, named = f"Mile 5\n\n{TEXT}", [{"title": "Mile 5", "content": TEXT}]
    for inside in (TEXT, titled):
        said = [{"role": "user", "content": f"{inside}\n\n{QUESTION}"}]
        expected = prompt_of(BlendCache(model, store).inputs_from_messages(tokenizer, said, [inside]))
        whole = Answerer(*asker, EVERYTHING, {"max_new_tokens": 1}).chat(said, named)
        given = [whole._inputs(BlendCache(model, store))]
        given.append(BlendCache(model, store).inputs_from_messages(tokenizer, said, named))
        assert [prompt_of(one) for one in given] == [expected] * 2


@pytest.mark.parametrize("door", [*NAMED, *MANY, rows])
def test_what_is_no_document_is_refused_by_its_number_at_every_door(door, asker):
    for kind, bad in BAD.items():
        with pytest.raises(PromptError, match=r"(document|chunk) 1 (is|has) .*expected") as raised:
            door(*asker, [TEXT, bad])
        assert "Leave it out" in str(raised.value), kind


@pytest.mark.parametrize("door", [door for door in (*NAMED, *MANY) if door is not batch])
def test_one_document_that_is_in_no_list_is_refused_at_every_door(door, asker):
    for alone in (TEXT, {"text": TEXT}, langchain_document(TEXT), b"the", 5):
        with pytest.raises(PromptError, match=r"expected a list of (documents|chunks). Write \[document\]"):
            door(*asker, alone)


@pytest.mark.parametrize("door", NAMED)
def test_an_empty_document_is_refused_by_its_number_where_documents_are_named(door, asker):
    for empty in EMPTY.values():
        with pytest.raises(PromptError, match=r"(document|chunk) 1 is .* has no text\. Leave empty documents out"):
            door(*asker, [TEXT, empty, OTHER])


@pytest.mark.parametrize("door", MANY)
def test_an_empty_document_fails_no_others_where_many_come_and_one_sentence_says_so(door, asker, caplog):
    model, tokenizer, _ = asker
    expected = door(model, tokenizer, ChunkStore.open("memory://"), [TEXT, OTHER])
    empty = list(EMPTY.values())
    with caplog.at_level(logging.WARNING, "hf_blend.prompt.documents"):
        assert door(model, tokenizer, ChunkStore.open("memory://"), [*empty, TEXT, OTHER]) == expected
    assert f"{len(empty)} of {len(empty) + 2} documents are empty and left out: 0, 1, 2" in caplog.messages[0]
    with pytest.raises(PromptError, match="each of 1 documents has no text"):
        door(*asker, [""])


def test_the_report_of_an_answer_says_which_documents_were_left_out(asker):
    answer = Answerer(*asker, EVERYTHING, NEW).chat(ASKED, [TEXT, "", OTHER]).whole()
    assert answer.report["notice"].startswith("1 of 3 documents are empty and left out: 1,")


def test_store_nodes_stores_what_prompts_have_and_passes_empty_nodes_on(asker, caplog):
    model, tokenizer, store = asker
    llm = llamaindex.BlendLLM(model=model, tokenizer=tokenizer, store=store)
    from llama_index.core.schema import NodeWithScore, TextNode

    told = NodeWithScore(node=TextNode(text=TEXT, metadata={"file_name": "a.md"}))
    nodes = [scored(OTHER), scored(" "), told]
    with caplog.at_level(logging.WARNING, "hf_blend.prompt.documents"):
        assert llamaindex.StoreNodes(llm=llm).postprocess_nodes(nodes) == nodes
    texts = [OTHER, f"file_name: a.md\n\n{TEXT}"]
    assert {entry.digest for entry in store.entries()} == {key.digest for key in store.keys(model, tokenizer, texts)}
    assert len(caplog.messages) == 1
    assert llamaindex.StoreNodes(llm=llm).postprocess_nodes(nodes[1:2]) == nodes[1:2], "alone, too"


def test_rows_that_are_empty_fail_no_others(asker, tmp_path, caplog):
    model, tokenizer, _ = asker
    with caplog.at_level(logging.WARNING, "hf_blend.integrations.indexing"):
        found = IndexChunks(lambda: (model, tokenizer), tmp_path)({"text": [TEXT, " ", {"text": ""}, OTHER, TEXT]})
    assert found["state"] == ["computed", "empty", "empty", "computed", "present"]
    assert [bool(digest) for digest in found["digest"]] == [True, False, False, True, True]
    assert caplog.messages == ["2 of 5 rows are empty and left out."]


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), range(5, 8), np.array([5, 6, 7]), torch.tensor([5, 6, 7])])
def test_token_ids_of_any_kind_are_chunks_and_bytes_are_none(ids, asker):
    model, tokenizer, store = asker
    assert store.add(model, tokenizer, [ids]) == store.add(model, tokenizer, [[5, 6, 7]])
    assert inputs(*asker, [ids]) == inputs(*asker, [[5, 6, 7]])
    for question, prefix in ((b"who", None), (QUESTION, b"who")):
        with pytest.raises(PromptError, match="expected text or token ids"):
            BlendCache(model, store).inputs(tokenizer, chunks=[ids], question=question, prefix=prefix)


def test_a_template_that_takes_documents_is_given_titles_and_texts_of_objects(asker):
    model, tokenizer, store = asker
    from langchain_core.documents import Document

    given = [Document(page_content=text, metadata={"source": "a.md"}) for text in DOCUMENTS]
    expected = tokenizer.apply_chat_template(
        ASKED, documents=[{"title": "a.md", "text": text} for text in DOCUMENTS], chat_template=COMMAND_R,
        add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    cache = BlendCache(model, store)
    assert prompt_of(cache.inputs_from_messages(tokenizer, ASKED, given, chat_template=COMMAND_R)) == [expected]
    whole = Answerer(*asker, EVERYTHING, NEW).chat(ASKED, given, {"chat_template": COMMAND_R}).whole()
    assert whole.prompt_tokens == len(expected)


@pytest.mark.parametrize("make", [*JSON_KINDS.values(), lambda text: {"chunks": [text]}])
def test_a_line_of_a_file_is_the_document_that_it_is_elsewhere(make, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(make(TEXT)) + "\n", "utf-8")
    assert [one.text for one in Corpus([str(tmp_path)])] == [TEXT]


@pytest.mark.parametrize(
    "line", [{"title": "Mile 5", "content": TEXT}, {"chunks": [{"title": "Mile 5", "text": TEXT}]}]
)
def test_the_title_of_a_line_stands_before_its_text(line, tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    assert [one.text for one in Corpus([str(tmp_path)])] == [f"Mile 5\n\n{TEXT}"]


@pytest.mark.parametrize("bad", [{"title": LONG}, 5, None, {"text": 5}, {"chunks": [5]}, {"chunks": TEXT}])
def test_a_line_that_is_no_document_is_refused_with_its_number(bad, tmp_path):
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(TEXT)}\n{json.dumps(bad)}\n", "utf-8")
    with pytest.raises(HfBlendError, match="line 2"):
        list(Corpus([str(tmp_path / "x.jsonl")]))


def test_an_empty_line_fails_no_others_and_is_named(tmp_path):
    blank = {"text": " ", "title": "blank"}
    lines = [TEXT, "", blank, {"page_content": OTHER}, {"chunks": [TEXT, ""]}, {"text": None}]
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    corpus = Corpus([str(tmp_path / "x.jsonl")])
    assert [one.text for one in corpus] == [TEXT, OTHER, TEXT]
    assert corpus.left_out == [(f"x.jsonl:{name}", "it holds no text") for name in ("2", "blank", "5.2", "6")]


ACCENTED = {
    "latin": "Ines Okafor, née Dvořák, keeps the café of Åland",
    "korean": "등대지기는 매일 밤 불을 켭니다",
    "vietnamese": "Người gác hải đăng thắp đèn mỗi đêm",
    "hindi": "प्रकाशस्तंभ का रखवाला हर रात \u0958लम से लिखता है",
    "ohm and kelvin": "A coil of 5 \u2126 at 4 \u212a",
    "marks in another order": "a\u0323\u0307 harbour of q\u0307\u0323",
}


def mixed(text):
    """Every second word composed, the others decomposed."""
    forms = ("NFC", "NFD")
    return " ".join(unicodedata.normalize(forms[at % 2], word) for at, word in enumerate(text.split(" ")))


@pytest.mark.parametrize("name", ACCENTED)
def test_a_document_is_found_in_a_prompt_however_its_accents_are_encoded_and_the_prompt_stays(name, asker):
    model, tokenizer, store = asker
    forms = {f"{unicodedata.normalize(form, ACCENTED[name])} (mile 5)." for form in ("NFC", "NFD")}
    forms |= {f"{mixed(ACCENTED[name])} (mile 5).", f"{ACCENTED[name]} (mile 5)."}  # the last as it is written
    assert len(forms) > 1
    for inside in forms:
        said = [{"role": "user", "content": f"{OTHER}\n\n{inside}\n\n{QUESTION}"}]
        expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
        for named in forms:
            given = BlendCache(model, store).inputs_from_messages(tokenizer, said, [OTHER, named])
            assert prompt_of(given) == [expected]
            whole = Answerer(*asker, EVERYTHING, {"max_new_tokens": 1}).chat(said, [OTHER, named])
            assert prompt_of(whole._inputs(BlendCache(model, store))) == [expected], "it is not put there again"


def test_a_document_is_not_found_where_a_letter_has_another_accent(asker):
    model, tokenizer, store = asker
    for inside, named in (("un café.", "un cafe"), ("un cafe\u0323\u0301 noir", "un cafe\u0301"), ("각", "가")):
        inside, named = unicodedata.normalize("NFC", inside), unicodedata.normalize("NFC", named)
        if named in inside:
            continue
        with pytest.raises(PromptError, match="is not in the prompt"):
            BlendCache(model, store).inputs_from_text(tokenizer, inside, [named])
