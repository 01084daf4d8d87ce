# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One question over documents, answered three ways one after another, told while it happens."""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue

from hf_blend import ChunkStore, plugins
from hf_blend.errors import PromptError

from ..answering import FULL_PREFILL, FULL_REUSE, Method, spans_of
from ..asking import Pipeline, Question, Reply
from ..documents import unknown_words
from ..inspecting import Inspector
from .model_cache import Loaded
from .request import DemoRequest, prepare
from .visitors import Limits


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
class DemoState:
    """All that the page shows."""

    panels: tuple[Panel, ...]
    status: str = ""
    tokens: tuple[tuple[str, bool], ...] = ()
    deviation: tuple[tuple[float, ...], ...] = ()
    columns: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    failed: bool = False


def compare(loaded: Loaded, store: ChunkStore, query: DemoRequest, limits: Limits) -> Iterator[DemoState]:
    """Answer three ways, and tell the state again and again while the answers are written."""
    question = prepare(loaded, query, limits)
    texts = "\n".join([query.question, query.documents, *(piece.text for piece in question.sources)])
    strange = unknown_words(loaded.tokenizer, texts)
    if strange and query.files:
        raise PromptError(f"{strange} Name a model that knows them, such as smollm2.")
    methods = (FULL_PREFILL, FULL_REUSE, Method("blend", query.config()))
    state = DemoState(tuple(Panel(method.name) for method in methods), sources=tuple(question.source_names))
    kept = yield from _store(loaded, store, question, state)
    state = replace(state, status="Asking three ways …")
    yield state
    pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
    report = pipeline.answer(question.request, methods[-1].config, 1).report
    for place, method in enumerate(methods):
        for told in _one(pipeline, question, (place, method), limits, state):
            yield told
        state = told
    said = [_verdict(state), kept, "" if report is None else report.notice, strange]
    yield replace(_looked_into(loaded, store, question, state), status=" ".join(filter(None, said)))


def again(
    loaded: Loaded, store: ChunkStore, query: DemoRequest, limits: Limits, state: DemoState
) -> Iterator[DemoState]:
    """Answer once more by blending alone, after a slider was moved."""
    pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
    which = (len(state.panels) - 1, Method("blend", query.config()))
    yield from _one(pipeline, prepare(loaded, query, limits), which, limits, state)


def _store(loaded: Loaded, store: ChunkStore, question: Question, state: DemoState) -> Generator[DemoState, None, str]:
    """Store the pieces that are missing, one by one, and say so; the result is a sentence."""
    chunks = [span.token_ids for span in spans_of(loaded.tokenizer, question.request)]
    keys = list(dict.fromkeys(store.keys(loaded.model, loaded.tokenizer, chunks)))
    missing = [key for key in keys if not store.contains(key)]
    present = len(keys) - len(missing)
    for number, key in enumerate(missing):
        yield replace(state, status=f"{present + number} of {len(keys)} pieces stored …")
        store.add(loaded.model, loaded.tokenizer, [key.token_ids])
    return f"{len(missing)} pieces stored now, {present} before."


def _one(
    pipeline: Pipeline, question: Question, which: tuple[int, Method], limits: Limits, state: DemoState
) -> Iterator[DemoState]:
    """Let one method answer; the state with its panel growing."""
    place, method = which
    text = ""

    def run(tell: Callable[[str], None]) -> Reply:
        return pipeline.ask(question, method, limits.new_tokens, tell)

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


def _looked_into(loaded: Loaded, store: ChunkStore, question: Question, state: DemoState) -> DemoState:
    """The state with the deviation of stored KV; without it where nothing can be reused."""
    try:
        inspector = Inspector(loaded.model, loaded.tokenizer, store, question.request, with_attention=False)
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
