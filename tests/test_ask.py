# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend ask` and `chat`: what one stores the next loads, each turn is a full prompt, comparisons are measured."""

import contextlib
import io
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, BlendConfig
from hf_blend.cli import output
from hf_blend.cli.main import main
from hf_blend.errors import PromptError
from hf_blend.evaluation import asking
from hf_blend.evaluation.answering import Turn, build_request
from hf_blend.evaluation.asking import Chat
from hf_blend.evaluation.bundled import handbook_questions, open_model
from hf_blend.evaluation.retrieving import Piece, Retriever
from tests.asking import memory
from tests.chat_templates import CHATML, TEMPLATES

SHORT = ("--max-new-tokens", "4")


def ask(store, *words):
    """The JSON that `ask` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["ask", "--json", *SHORT, "--store", str(store), *words])
    assert not ended.value.code, out.getvalue()
    return json.loads(out.getvalue())


@pytest.fixture(scope="module")
def store(tmp_path_factory, small_smollm2):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def first(store):
    return ask(store)


def test_reorder_loads_what_was_healed_as_exact(tmp_path, small_smollm2):
    first, second = (ask(tmp_path, "--reorder")["rows"][0] for _ in range(2))
    assert first["recomputed_tokens"] > 0
    assert second["recomputed_tokens"] == 0
    assert second["reused_tokens"] > first["reused_tokens"]


@pytest.fixture
def two_questions(monkeypatch):
    questions = handbook_questions()[:2]
    monkeypatch.setattr("hf_blend.evaluation.bundled.handbook_questions", lambda: questions)
    return questions


def test_ask_loads_what_earlier_run_stored_and_answers_alike(store, first):
    files = {path: path.read_bytes() for path in store.rglob("*.safetensors")}
    second = ask(store)
    assert first["chunks"]["computed"] > 0
    assert second["chunks"]["computed"] == 0
    assert second["chunks"]["loaded"] > 0
    for row, again in zip(first["rows"], second["rows"], strict=True):
        assert row["answer"] == again["answer"]
    assert files
    assert {path: path.read_bytes() for path in store.rglob("*.safetensors")} == files
    for row in first["rows"]:
        assert {"method", "question", "answer", "ttft_ms", "charged_budget", "sources"} <= row.keys()
        assert row["method"] == "blend"
        assert 0 < row["recomputed_tokens"] < row["reused_tokens"] < row["prompt_tokens"]


def test_ask_compare_prints_answers_once_and_line_for_each_method(store, first, run, two_questions, monkeypatch):
    class Immediate:
        """A timer whose time is up when it starts."""

        def __init__(self, seconds, function, arguments):
            self.start = lambda: function(*arguments)
            self.cancel = lambda: None

    monkeypatch.setattr(output.threading, "Timer", Immediate)
    _, out, err = run("ask", "--compare", "--tokens", *SHORT, "--store", store)
    for question in two_questions:
        assert question["question"] in out
    table = []
    for line in out.splitlines():
        if "\t" in line:
            table.append(line.split("\t"))
    head, full, reuse, blend = table
    assert head == ["method", "first token", "speed-up", "work", "KL"]
    assert full[0] == "full prefill"
    assert float(full[4]) == 0
    assert float(reuse[4]) > 0
    assert float(blend[4]) > 0
    assert "Recomputed tokens stand out:\n" in out
    assert re.search(r"median of 6,.*2 questions", err)
    assert re.search(r"the store holds \d+, [\d.]+ kB", err)
    for step in ("storing its chunks …", "blend, 3 of 3 …", "timing and comparing the methods …"):
        assert f"Question 2 of 2: {step}" in err


def test_ask_compare_times_methods_in_turns_and_takes_median(store, first, two_questions, monkeypatch):
    answer = asking.Pipeline.answer
    timed = []

    def answer_timed(pipeline, request, config, *arguments):
        timed.append("full prefill" if config is None else config.selector)
        return replace(answer(pipeline, request, config, *arguments), ttft_ms=100.0 * len(timed) ** 2)

    monkeypatch.setattr(asking.Pipeline, "answer", answer_timed)
    rows = ask(store, "--compare", "--rounds", "3")["rows"]
    methods = timed[1:4]
    assert timed[1:10] == 3 * methods, "behind the one that stores the chunks"
    assert [row["ttft_ms"] for row in rows[:3]] == [2500, 3600, 4900]


def test_diverge_is_kl_of_two_forced_answers(source, model, monkeypatch):
    tokenizer = source.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    chunks = ["The light of Skerry is kept by Una Moss.\n\n", "A lantern is dear.\n\n"]
    question = asking.Question("", build_request(tokenizer, chunks, "Who keeps the light?", None))
    store = memory()
    pipeline = asking.Pipeline(model, tokenizer, store)
    replies = [pipeline.ask(question, way, 12) for way in asking.methods(BlendConfig(0.15), compare=True)]
    pipeline.diverge(question, replies)
    full, reused, _ = replies

    # By hand: stock logits over the answer, and those of a cache of full reuse
    ids = full.answer.ids[:10]
    prompt = full.answer.input_ids
    cache = BlendCache(model, store, recompute_ratio=0.0, selector="none")
    inputs = cache.inputs_from_messages(tokenizer, **question.request)
    with torch.no_grad():
        whole = torch.cat([prompt, ids])
        stock = model(whole[None]).logits[0, len(prompt) - 1 : -1]
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
        cache.crop(-1)
        forced = torch.cat([prompt[-1:], ids[:-1]])
        blended = model(forced[None], past_key_values=cache).logits[0]
    stock = stock.log_softmax(-1)
    blended = blended.log_softmax(-1)
    expected = torch.nn.functional.kl_div(blended, stock, log_target=True, reduction="batchmean")
    assert full.row["kl"] == 0.0
    assert reused.row["kl"] == pytest.approx(float(expected), rel=1e-3)


TEXTS = {"a.txt": "Mara keeps the light.\n", "b.txt": "Tomas repairs boats.\n", "c.txt": "The mill is old.\n"}


@pytest.fixture(scope="module")
def source(model_folder):
    return open_model(model_folder, device="cpu")


@pytest.fixture(scope="module")
def model(source):
    return source.load()


@pytest.fixture
def make_chat(source, model):
    """Make a chat over three documents; everything is computed, so that it is exact."""
    pytest.importorskip("bm25s", reason="the extra rag is not installed: pip install hf-blend[rag]")

    def make(top_k=2, template=None, new_tokens=4, config=None):
        pieces = []
        for name, text in TEXTS.items():
            pieces.append(Piece(name, 0, text, tuple(source.tokenizer.encode(text, add_special_tokens=False))))
        source.tokenizer.chat_template = template
        pipeline = asking.Pipeline(model, source.tokenizer, memory())
        config = config or BlendConfig(recompute_ratio=1.0)
        return Chat(pipeline, source, Retriever(pieces, top_k), config, max_new_tokens=new_tokens)

    return make


def names(question):
    return [piece.name for piece in question.sources]


@pytest.mark.parametrize("template", [None, "chatml", "deepseek", "gemma", "mistral", "qwen3", "system_last"])
def test_chat_answers_each_turn_as_full_prefill_of_same_prompt(make_chat, source, model, template):
    chat = make_chat(template=template and TEMPLATES[template])
    for text in ("Who keeps the light?", "Who repairs boats?"):
        question = chat.prepare(text)
        answer = chat.answer(question)
        ids = answer.input_ids[None]
        if template:
            messages = question.request["messages"]
            stock = source.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            assert answer.input_ids.tolist() == stock["input_ids"]
            earlier = [message["content"] for message in messages if message["role"] == "assistant"]
            assert earlier == [turn.answer for turn in chat.turns[:-1]]
        full = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        assert answer.text == source.tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_chat_reads_as_many_pieces_as_fit_and_computes_each_once(make_chat):
    assert names(make_chat(top_k=2).prepare("light and boats?")) == ["b.txt", "a.txt"]
    crowded = make_chat(top_k=0, new_tokens=1998).prepare("Who?")  # of 2048 positions
    assert len(crowded.sources) == 2
    assert crowded.squeezed_out == 1

    chat = make_chat(top_k=1)
    counts = []
    for text in ("light?", "Who repairs boats?", "Tomas and boats?"):
        counts.append(chat.answer(chat.prepare(text)).report.computed_chunks)
    assert counts[0] > 0
    assert counts[1:] == [1, 0]  # the document alone: what is before it was stored in the first turn
    assert len(chat.pipeline.store) <= 1 + len(TEXTS), "what was said is not stored"


def test_chat_only_grows_and_is_healed_while_nobody_asks(make_chat, model, monkeypatch):
    monkeypatch.setattr(asking, "HEALED_TOKENS", 8)
    chat = make_chat(template=CHATML, config=BlendConfig(recompute_ratio=0.0, selector="none"))
    for number, text in enumerate(("Who keeps the light?", "Who repairs boats?", "And the light?")):
        question = chat.prepare(text)
        answer = chat.answer(question)
        chat.heal_while(partial(next, iter([True, False])))
        assert chat.cache.heal(0) or number, "one step, then a question came"
        chat.heal_while(lambda: True)
        assert re.search(r"(\d+) of \1 are exact", chat.stats())
        assert (answer.report.past_tokens > 0) == (number > 0)
        assert answer.cost["prompt_tokens"] > answer.cost["reused_tokens"] >= answer.report.past_tokens
    brought = []
    for turn in chat.turns:
        brought += turn.documents
    assert len(brought) == len({*brought})

    # What the cache holds is what a stock prefill computes
    tokens = chat.cache.get_seq_length()
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor(chat.cache.state.tokens.rows()), past_key_values=plain)
    for layer, expected in zip(chat.cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :tokens], expected.keys, rtol=0, atol=1e-4)
    chat.reset()
    assert chat.stats() == "Nothing was asked yet."


def test_chat_forgets_oldest_turns_where_there_is_no_room(make_chat):
    chat = make_chat(new_tokens=1000)
    chat.turns += [Turn("a" * 600, "b" * 600), Turn("c", "d")]
    assert chat.prepare("Who?").sources
    assert [turn.question for turn in chat.turns] == ["c"]


def test_chat_forgets_no_turn_for_question_that_cannot_be_asked(make_chat):
    template = CHATML + "{% if messages[-1].content.endswith('No') %}{{ raise_exception('not so') }}{% endif %}"
    chat = make_chat(template=template)
    chat.turns += [Turn("Who?", "Tomas."), Turn("Why?", "So.")]
    for text, reason in (("No", "refused .*not so"), ("Who\ud83d?", "half of a"), ("a " * 2100, "do not fit")):
        with pytest.raises(PromptError, match=reason):
            chat.answer(chat.prepare(text))
        assert [turn.question for turn in chat.turns] == ["Who?", "Why?"]
    assert chat.answer(chat.prepare("And?")).input_ids.numel() > 0
    assert len(chat.turns) == 3


def test_chat_command_streams_answers_names_sources_and_ends(tmp_path, monkeypatch, run, model_folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).write_text(text)
    lines = "Who keeps the light?\n/sources\n/stats\n/nonsense\n\n/reset\nAnd boats?\n/quit\nnever asked\n"
    words = ["chat", "docs", "--model", model_folder, "--store", "kv", "--max-new-tokens", "3", "--top-k", "1"]
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code, out, err = run(*words)
    assert not code, err
    assert "Who keeps the light?" in out
    assert "And boats?" in out
    assert "never asked" not in out
    assert out.count("Retrieved: docs/") == 2
    assert err.count("Retrieved: docs/a.txt, characters 0 to 22") == 1, "/sources"
    assert len(re.findall(r"First token after [\d.]+ s: \d+ of \d+ tokens reused, \d+ recomputed", err)) == 2
    assert "There is no /nonsense." in err
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    _, out, _ = run(*words, "--json")
    first, second = json.loads(out)["rows"]
    assert first["question"] == "Who keeps the light?"
    assert first["chunks"]["computed"] == 0
    assert second["chunks"]["computed"] == 0
