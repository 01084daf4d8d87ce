# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One question over documents, answered three ways one after another, told while it happens."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from textwrap import shorten
from typing import Any

from hf_blend import BlendConfig, ChunkStore, plugins
from hf_blend.errors import PromptError
from hf_blend.prompt.pieces import Span

from ..answering import FULL_PREFILL, FULL_REUSE, Method, spans_of
from ..asking import Pipeline, Question, Reply
from ..documents import unknown_words
from ..inspecting import Inspector
from .model_cache import Loaded
from .request import DemoRequest, prepare
from .visitors import Limits

TITLE_LETTERS = 28  # of a document without a name


@dataclass(frozen=True)
class Panel:
    """What is known about one way to answer."""

    method: str
    state: str = "waiting"
    text: str = ""
    ttft_ms: float | None = None
    charged: float | None = None
    correct: bool | None = None


@dataclass(frozen=True)
class Passage:
    """A document, or a piece of one: where its tokens are in the prompt."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class DemoState:
    """All that the page shows."""

    panels: tuple[Panel, ...]
    status: str = ""
    tokens: tuple[tuple[str, bool], ...] = ()
    deviation: tuple[tuple[float, ...], ...] = ()
    columns: tuple[int, ...] = ()
    passages: tuple[Passage, ...] = ()
    failed: bool = False


def compare(loaded: Loaded, store: ChunkStore, query: DemoRequest, limits: Limits) -> Iterator[DemoState]:
    """Answer three ways, and tell the state again and again while the answers are written."""
    question = prepare(loaded, query, limits)
    texts = "\n".join([query.question, query.documents, *(piece.text for piece in question.sources)])
    strange = unknown_words(loaded.tokenizer, texts)
    if strange and query.files:
        raise PromptError(f"{strange} Name a model that knows them, such as smollm2.")
    pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
    yield from answer_three_ways(pipeline, question, query.config(), limits.new_tokens, strange)


def answer_three_ways(
    pipeline: Pipeline, question: Question, config: BlendConfig, new_tokens: int, notice: str = ""
) -> Iterator[DemoState]:
    """Answer a question by full prefill, full reuse and blending, and look into its prompt; the state as it grows."""
    methods = (FULL_PREFILL, FULL_REUSE, Method("blend", config))
    spans = spans_of(pipeline.tokenizer, question.request)
    state = DemoState(
        tuple(Panel(method.name) for method in methods), passages=_passages(pipeline.tokenizer, question, spans)
    )
    kept = yield from _store(pipeline, spans, state)
    state = replace(state, status="Asking three ways …")
    yield state
    report = pipeline.answer(question.request, config, 1).report
    for place, method in enumerate(methods):
        for told in _one(pipeline, question, (place, method), new_tokens, state):
            yield told
        state = told
    said = [_verdict(state), kept, "" if report is None else report.notice, notice]
    yield replace(_looked_into(pipeline, question, state), status=" ".join(filter(None, said)))


def again(
    loaded: Loaded, store: ChunkStore, query: DemoRequest, limits: Limits, state: DemoState
) -> Iterator[DemoState]:
    """Answer once more by blending alone, after a slider was moved."""
    pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
    which = (len(state.panels) - 1, Method("blend", query.config()))
    yield from _one(pipeline, prepare(loaded, query, limits), which, limits.new_tokens, state)


def _passages(tokenizer: Any, question: Question, spans: Sequence[Span]) -> tuple[Passage, ...]:
    """The documents of a prompt by the names of their sources; by their first lines where these are not known."""
    names = [piece.name for piece in question.sources]
    if len(names) != len(spans):
        names = [_title(tokenizer.decode(span.token_ids)) for span in spans]
    return tuple(Passage(name, span.start, span.stop) for name, span in zip(names, spans, strict=True))


def _title(text: str) -> str:
    first = text.strip().partition("\n")[0].lstrip("# ")
    return shorten(first, TITLE_LETTERS, placeholder=" …") or first[:TITLE_LETTERS]


def _store(pipeline: Pipeline, spans: Sequence[Span], state: DemoState) -> Generator[DemoState, None, str]:
    """Store the pieces that are missing, one by one, and say so; the result is a sentence."""
    model, tokenizer, store = pipeline.model, pipeline.tokenizer, pipeline.store
    keys = list(dict.fromkeys(store.keys(model, tokenizer, [span.token_ids for span in spans])))
    missing = [key for key in keys if not store.contains(key)]
    present = len(keys) - len(missing)
    for number, key in enumerate(missing):
        yield replace(state, status=f"{present + number} of {len(keys)} pieces stored …")
        store.add(model, tokenizer, [key.token_ids])
    return f"{len(missing)} pieces stored now, {present} before."


def _one(
    pipeline: Pipeline, question: Question, which: tuple[int, Method], new_tokens: int, state: DemoState
) -> Iterator[DemoState]:
    """Let one method answer; the state with its panel growing."""
    place, method = which
    text = ""

    def run(tell: Callable[[str], None]) -> Reply:
        return pipeline.ask(question, method, new_tokens, tell)

    yield _with_panel(state, place, Panel(method.name, "writing"))
    for told in streamed(run):
        if isinstance(told, Reply):
            row, marks = told.row, tuple(told.tokens) if told.answer.report else state.tokens
            rule = plugins.load("evaluation.scores", "containment")()
            correct = bool(rule.best(row["answer"], question.answers)) if question.answers else None
            done = Panel(method.name, "done", row["answer"], row["ttft_ms"], row["charged_budget"], correct)
            yield replace(_with_panel(state, place, done), tokens=marks)
        else:
            text += told
            yield _with_panel(state, place, Panel(method.name, "writing", text))


def _verdict(state: DemoState) -> str:
    """Say what blending was good for, if it saved time; of an unknown answer, whether the words are the same."""
    full, reuse, blend = state.panels
    if not (full.ttft_ms and blend.ttft_ms):
        return ""
    if blend.ttft_ms >= full.ttft_ms:
        return "This prompt is too short, or this model too small, for blending to save time."
    speed = f"{full.ttft_ms / blend.ttft_ms:.1f} x as fast as full prefill"
    if (full.correct, reuse.correct, blend.correct) == (True, False, True):
        return f"Blending gave the right answer {speed}; full reuse got it wrong."
    if full.correct is not None:
        return f"Blending began its answer {speed}."
    kept, lost = f"with {_words(blend, full)}", f"full reuse wrote {_words(reuse, full)}"
    return f"Blending began its answer {speed}, {kept}; {lost}."


def _words(panel: Panel, full: Panel) -> str:
    return "the same words" if panel.text == full.text else "other words"


def _with_panel(state: DemoState, place: int, panel: Panel) -> DemoState:
    return replace(state, panels=(*state.panels[:place], panel, *state.panels[place + 1 :]))


def _looked_into(pipeline: Pipeline, question: Question, state: DemoState) -> DemoState:
    """The state with the deviation of stored KV; without it where nothing can be reused."""
    try:
        inspector = Inspector(
            pipeline.model, pipeline.tokenizer, pipeline.store, question.request, with_attention=False
        )
    except PromptError:
        return state
    rows = tuple(tuple(row) for row in inspector.deviation())
    return replace(state, deviation=rows, columns=tuple(inspector.columns))


class _Gone(RuntimeError):
    """Nobody listens any more."""


def streamed(run: Callable[[Callable[[str], None]], Reply]) -> Iterator[str | Reply]:
    """Run something that tells text as it goes, in a thread of its own."""
    told: SimpleQueue[str | None] = SimpleQueue()
    gone = threading.Event()

    def tell(text: str) -> None:
        if gone.is_set():
            raise _Gone("the page was closed")
        told.put(text)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, tell)
        future.add_done_callback(lambda _: told.put(None))
        try:
            yield from iter(told.get, None)
            yield future.result()
        finally:
            gone.set()
