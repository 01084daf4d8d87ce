# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend ask` in a process of its own, and `chat`: what one stores the next loads, each turn is a full prompt."""

import contextlib
import functools
import io
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.cli import output
from hf_blend.cli.main import main
from hf_blend.errors import PromptError
from hf_blend.evaluation import asking
from hf_blend.evaluation.answering import Turn, build_request
from hf_blend.evaluation.asking import Chat
from hf_blend.evaluation.bundled import handbook_questions, open_model
from hf_blend.evaluation.retrieving import Piece, Retriever
from hf_blend.loading.profile import Point, Profile
from tests.chat_templates import CHATML, TEMPLATES

SHORT = ("--max-new-tokens", "4")


def asked_outside(store: Path) -> dict:
    """Ask in another process."""
    command = [sys.executable, "-m", "hf_blend", "ask", "--json", *SHORT, "--store", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.fixture(scope="module")
def store(tmp_path_factory, small_smollm2):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def first(store):
    return asked(store)


def asked(store: Path, *words: str) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        main(["ask", "--json", *SHORT, "--store", str(store), *words])
    assert not ended.value.code, out.getvalue()
    return json.loads(out.getvalue())


@pytest.mark.parametrize("another", [asked, pytest.param(asked_outside, marks=pytest.mark.slow)])
def test_a_second_run_loads_what_the_first_computed_and_answers_alike(another, store, first):
    before = contents(store)
    second = another(store)
    assert first["chunks"]["computed"] > 0
    assert second["chunks"]["computed"] == 0
    assert second["chunks"]["loaded"] > 0
    assert [row["answer"] for row in second["rows"]] == [row["answer"] for row in first["rows"]]
    assert before
    assert contents(store) == before


def test_every_row_has_the_keys_that_programs_rely_on(first):
    keys = {"method", "question", "answer", "ttft_ms", "charged_budget", "sources"}
    assert all(keys <= set(row) for row in first["rows"])
    for row in first["rows"]:
        assert 0 < row["recomputed_tokens"] < row["reused_tokens"] < row["prompt_tokens"]
    assert {row["method"] for row in first["rows"]} == {"blend"}


def test_a_controller_says_what_it_decided(store, first, monkeypatch, run):
    points = [Point(tokens, ratio, tokens * ratio / 1e3) for tokens in (512, 1536) for ratio in (0.05, 0.5)]
    rates = {"disk": 1.0}
    monkeypatch.setattr("hf_blend.loading.controller.profile_of", lambda *given: Profile({}, tuple(points), 1e3))
    monkeypatch.setattr("hf_blend.loading.controller.tier_rates", lambda *given: rates)

    (row, *_) = asked(store, "--controller")["rows"]
    assert row["advice"]["loaded_chunks"] == 0, "a byte a second"
    rates["disk"] = 1e15
    assert re.search(
        "Controller: recompute 12.0%, load [1-9]", run("ask", "--controller", *SHORT, "--store", store)[2]
    )


@pytest.mark.slow
def test_compared_methods_are_timed_in_turns_and_the_median_counts(store, first, monkeypatch):
    taken, answer = [], asking.Pipeline.answer

    def timed(asker, given, config, *args):
        name = "full prefill" if config is None else "full reuse" if config.selector == "none" else "blend"
        taken.append((name, 100.0 * len(taken) ** 2))  # the mean is another
        return replace(answer(asker, given, config, *args), ttft_ms=taken[-1][1])

    monkeypatch.setattr(asking.Pipeline, "answer", timed)
    rows = asked(store, "--compare", "--rounds", "3")["rows"]
    names = [row["method"] for row in rows[:3]]
    assert [name for name, _ in taken[1:10]] == 3 * names, "behind the one that stores the chunks"
    assert [row["ttft_ms"] for row in rows[:3]] == [ms for _, ms in taken[4:7]], "the middle one of the three"


def test_a_comparison_prints_each_answer_once_and_a_line_for_each_method(store, first, run, monkeypatch):
    few = handbook_questions()[:2]
    monkeypatch.setattr("hf_blend.evaluation.bundled.handbook_questions", lambda: few)
    _, out, err = run("ask", "--compare", *SHORT, "--store", store)
    for one in few:
        assert one["question"] in out
    table = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert table[0] == ["method", "first token", "speed-up", "work", "KL"]
    assert [line[0] for line in table[1:]] == ["full prefill", "full reuse", "blend"]
    assert [float(line[4]) > 0 for line in table[1:]] == [False, True, True]
    assert "stand out" not in out
    assert "median of 2" in err
    assert "2 questions" in err
    assert re.search(r"the store holds \d+ chunks, [\d.]+ kB", err)


def test_a_comparison_says_what_it_does_where_that_takes_long(store, first, run, monkeypatch):
    few = handbook_questions()[:2]
    monkeypatch.setattr("hf_blend.evaluation.bundled.handbook_questions", lambda: few)
    monkeypatch.setattr(output.threading, "Timer", Soon)
    _, _, err = run("ask", "--compare", *SHORT, "--store", store)
    said = [line.removeprefix("Question ") for line in err.splitlines() if line.startswith("Question ")]
    steps = ["storing its chunks …", *(f"{name} …" for name in ("full prefill, 1 of 3", "full reuse, 2 of 3"))]
    steps += ["blend, 3 of 3 …", "timing and comparing the methods …"]
    assert said == [f"{number} of 2: {step}" for number in (1, 2) for step in steps]
    assert "Question 1" not in run("ask", *SHORT, "--store", store)[2], "an answer is streamed meanwhile"


class Soon:
    """A timer whose time is up when it starts."""

    def __init__(self, seconds, function, args):
        self._call = functools.partial(function, *args)

    def start(self):
        self._call()

    def cancel(self):
        pass


def test_tokens_shows_which_were_recomputed_and_needs_a_comparison(store, first, run, monkeypatch):
    few = handbook_questions()[:1]
    monkeypatch.setattr("hf_blend.evaluation.bundled.handbook_questions", lambda: few)
    _, out, _ = run("ask", "--compare", "--tokens", *SHORT, "--store", store)
    assert "Recomputed tokens stand out:\n" in out
    assert run("ask", "--tokens")[::2] == (
        2,
        "hf-blend: got --tokens without --compare. Methods are timed, and tokens shown, only with it.\n",
    )


def test_a_check_of_the_model_is_said_where_it_takes_long(capsys):
    for wait_s, said in ((0.3, "Checking.\n"), (0.0, "")):
        with output.said_if_slow("Checking.", 0.1):
            time.sleep(wait_s)
        assert capsys.readouterr().err == said


def test_an_answer_that_was_cut_is_said_to_be(store, first, run):
    _, out, err = run("ask", "--max-new-tokens", "1", "--store", store)
    assert err.count("Cut at 1 tokens, set --max-new-tokens higher: blend.") == 3
    assert all(one["question"] in out for one in handbook_questions())


def test_the_kl_is_that_of_two_forced_answers(source, model, monkeypatch):
    tokenizer, chunks = source.tokenizer, ["The light of Skerry is kept by Una Moss.\n\n", "A lantern is dear.\n\n"]
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    made = asking.Question("", build_request(tokenizer, chunks, "Who keeps the light?", None))
    ways, opened = asking.methods(BlendConfig(0.15), compare=True), ChunkStore.open("memory://")
    asker = asking.Pipeline(model, tokenizer, opened)
    replies = [asker.ask(made, way, 12) for way in ways]
    asker.diverge(made, replies)
    full, reused, _ = replies
    ids, prompt = full.answer.ids[:10], full.answer.input_ids
    cache = BlendCache(model, opened, recompute_ratio=0.0, selector="none")
    inputs = cache.inputs_from_messages(tokenizer, made.request["messages"], made.request["documents"])
    with torch.no_grad():
        stock = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
        cache.crop(-1)
        got = model(torch.cat([prompt[-1:], ids[:-1]])[None], past_key_values=cache).logits[0].log_softmax(-1)
    expected = torch.nn.functional.kl_div(got, stock, log_target=True, reduction="batchmean")
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
def make(source, model):
    """Make a chat over three documents, with or without a template; everything is computed, so that it is exact."""
    pytest.importorskip("bm25s", reason="the extra rag is not installed: pip install hf-blend[rag]")

    def made(top_k=2, template=None, new_tokens=4, **settings):
        encode = source.tokenizer.encode
        found = [Piece(name, 0, text, tuple(encode(text, add_special_tokens=False))) for name, text in TEXTS.items()]
        source.tokenizer.chat_template = template
        asker = asking.Pipeline(model, source.tokenizer, ChunkStore.open("memory://"))
        retriever, config = Retriever(found, top_k), BlendConfig(recompute_ratio=1.0)
        return Chat(asker, source, retriever, config, max_new_tokens=new_tokens, **settings)

    return made


@pytest.mark.parametrize("template", [None, "chatml", "deepseek", "gemma", "mistral", "qwen3", "system_last"])
def test_an_answer_in_any_turn_is_that_of_a_full_prefill_of_the_same_prompt(make, source, model, template):
    talk = make(template=template and TEMPLATES[template])
    for question in ("Who keeps the light?", "Who repairs boats?"):
        asked = talk.prepare(question)
        got = talk.answer(asked)
        ids = got.input_ids[None]
        if template:
            messages = asked.request["messages"]
            stock = source.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            assert got.input_ids.tolist() == stock["input_ids"]
            assert [one["content"] for one in messages if one["role"] == "assistant"] == [
                turn.answer for turn in talk.turns[:-1]
            ]
        full = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
        text = source.tokenizer.decode(full[0, ids.shape[1] :], skip_special_tokens=True).strip()
        assert got.text == text
    assert [turn.question for turn in talk.turns] == ["Who keeps the light?", "Who repairs boats?"]


def names(question):
    return [piece.name for piece in question.sources]


def test_as_many_pieces_are_read_as_are_asked_for_and_the_model_has_room_for(make):
    assert names(make(top_k=2).prepare("light and boats?")) == ["b.txt", "a.txt"]
    crowded = make(top_k=0, new_tokens=1998)  # of 2048 positions
    asked = crowded.prepare("Who?")
    assert (len(asked.sources), asked.squeezed_out) == (2, 1)


def test_documents_are_retrieved_for_each_turn_and_computed_once(make):
    talk = make(top_k=1)
    asks = [talk.prepare(question) for question in ("light?",)]
    assert names(asks[0]) == ["a.txt"]
    first = talk.answer(asks[0])
    boats = talk.prepare("Who repairs boats?")
    assert names(boats) == ["b.txt"]
    second = talk.answer(boats)
    third = talk.answer(talk.prepare("Tomas and boats?"))
    assert first.report.computed_chunks > 0
    assert second.report.computed_chunks == 1  # the document alone: what stands before it was stored in the first turn
    assert third.report.computed_chunks == 0


def test_a_conversation_only_grows_and_is_healed_while_nobody_asks(make, source, model):
    talk = make(template=CHATML)
    talk.config = BlendConfig(recompute_ratio=0.0, selector="none")
    for number, question in enumerate(("Who keeps the light?", "Who repairs boats?", "And the light?")):
        prepared = talk.prepare(question)
        got = talk.answer(prepared)
        talk.healing._future.result(60)
        assert "are exact" in talk.stats()
        assert (got.report.past_tokens > 0) == (number > 0)
        assert len(got.input_ids) == got.gain["prompt_tokens"] > got.gain["reused_tokens"] >= got.report.past_tokens
        assert got.report.healed_tokens > 0 or not prepared.documents
    told = [text for turn in talk.turns for text in turn.documents]
    assert len(told) == len(set(told)) == len(TEXTS)
    prompt, last = talk.cache.prompts.beginnings[0], talk.cache.kv.all[-1].keys
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([prompt]), past_key_values=plain)
    torch.testing.assert_close(last[:, :, : len(prompt)], plain.layers[-1].keys, rtol=0, atol=1e-4)
    talk.reset()
    assert talk.stats() == "Nothing was asked yet."


def test_what_was_said_is_never_stored(make):
    talk = make()
    for number in range(3):
        talk.answer(talk.prepare(f"Who keeps the light, number {number}?"))
    assert len(talk.pipeline.store) <= 1 + len(TEXTS)


def test_the_oldest_turns_leave_when_there_is_no_room(make):
    talk = make(new_tokens=1000)
    talk.turns += [Turn("a" * 600, "b" * 600), Turn("c", "d")]
    asked = talk.prepare("Who?")
    assert [turn.question for turn in talk.turns] == ["c"]
    assert asked.sources


def test_a_chat_forgets_no_turn_for_a_question_that_cannot_be_asked(make):
    odd = CHATML + "{% if messages[-1].content.endswith('No') %}{{ raise_exception('not so') }}{% endif %}"
    talk = make(template=odd)
    talk.turns += [Turn("Who?", "Tomas."), Turn("Why?", "So.")]
    for wrong, reason in (
        ("No", "refused .*not so"),
        ("Who\ud83d?", "half of a surrogate"),
        ("a " * 2100, "do not fit"),
    ):
        with pytest.raises(PromptError, match=reason):
            talk.answer(talk.prepare(wrong))
        assert [turn.question for turn in talk.turns] == ["Who?", "Why?"]
    assert talk.answer(talk.prepare("And?")).input_ids.numel() > 0
    assert len(talk.turns) == 3


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
    assert [line for line in out.splitlines() if line][0::3] == ["Who keeps the light?", "And boats?"]
    assert out.count("Retrieved: docs/") == 2
    assert "Retrieved: docs/a.txt, characters 0 to 22" in out
    assert err.count("Retrieved: docs/a.txt, characters 0 to 22") == 1, "/sources"
    assert len(re.findall(r"First token after [\d.]+ s: \d+ of \d+ tokens reused, \d+ recomputed", err)) == 2
    assert "There is no /nonsense." in err
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    rows = json.loads(run(*words, "--json")[1])["rows"]
    assert [row["question"] for row in rows] == ["Who keeps the light?", "And boats?"]
    assert [row["chunks"]["computed"] for row in rows] == [0, 0]
