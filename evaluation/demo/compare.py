# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One question over documents, answered three ways one after another; the page's state while it happens."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import SimpleQueue
from textwrap import shorten
from typing import Any

from hf_blend import BlendConfig, ChunkStore, plugins
from hf_blend.prompt.pieces import Span

from ..answering import FULL_PREFILL, FULL_REUSE, Method, spans_of
from ..asking import Pipeline, Question, Reply
from .loaded import Loaded
from .request import DemoRequest, prepare
from .visitors import Limits

TITLE_LETTERS = 28  # of a document


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
    """A document: its title, and where its tokens are in the prompt."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class DemoState:
    """All that the page shows."""

    panels: tuple[Panel, ...]
    status: str = ""
    tokens: tuple[tuple[str, bool], ...] = ()
    passages: tuple[Passage, ...] = ()
    failed: bool = False


def compare(loaded: Loaded, store: ChunkStore, query: DemoRequest, limits: Limits) -> Iterator[DemoState]:
    """Answer three ways; yields the state again and again while the answers are written."""
    question = prepare(loaded, query, limits)
    pipeline = Pipeline(loaded.model, loaded.tokenizer, store)
    yield from answer_three_ways(pipeline, question, query.config(), limits.new_tokens)


def answer_three_ways(
    pipeline: Pipeline, question: Question, config: BlendConfig, new_tokens: int
) -> Iterator[DemoState]:
    """Answer a question by full prefill, full reuse and blending; yields the state as it grows."""
    methods = (FULL_PREFILL, FULL_REUSE, Method("blend", config))
    spans = spans_of(pipeline.tokenizer, question.request)
    passages = tuple(Passage(_title(pipeline.tokenizer.decode(s.token_ids)), s.start, s.stop) for s in spans)
    state = DemoState(tuple(Panel(method.name) for method in methods), passages=passages)
    stored = yield from _store(pipeline, spans, state)
    state = replace(state, status="Asking three ways …")
    yield state

    # Warm up, so that no method pays for what is done once
    report = pipeline.answer(question.request, config, 1).report
    for index, method in enumerate(methods):
        for after in _answer(pipeline, question, index, method, new_tokens, state):
            yield after
        state = after
    notice = "" if report is None else report.notice
    sentences = [_verdict(state), stored, notice]
    yield replace(state, status=" ".join(filter(None, sentences)))


def _title(text: str) -> str:
    first = text.strip().partition("\n")[0].lstrip("# ")
    return shorten(first, TITLE_LETTERS, placeholder=" …") or first[:TITLE_LETTERS]


def _store(pipeline: Pipeline, spans: Sequence[Span], state: DemoState) -> Generator[DemoState, None, str]:
    """Store the chunks that are missing, one by one, and say so; the result is a sentence."""
    model, tokenizer, store = pipeline.model, pipeline.tokenizer, pipeline.store
    keys = list(dict.fromkeys(store.keys(model, tokenizer, [span.token_ids for span in spans])))
    missing = [key for key in keys if not store.contains(key)]
    present = len(keys) - len(missing)
    for number, key in enumerate(missing):
        yield replace(state, status=f"{present + number} of {len(keys)} chunks stored …")
        store.add(model, tokenizer, [key.token_ids])
    return f"{len(missing)} chunks were computed, {present} loaded."


def _answer(
    pipeline: Pipeline, question: Question, index: int, method: Method, new_tokens: int, state: DemoState
) -> Iterator[DemoState]:
    """Let one method answer; yields the state with its panel growing."""

    def run(tell: Callable[[str], None]) -> Reply:
        return pipeline.ask(question, method, new_tokens, tell)

    text = ""
    yield _with_panel(state, index, Panel(method.name, "writing"))
    for item in streamed(run):
        if isinstance(item, str):
            text += item
            yield _with_panel(state, index, Panel(method.name, "writing", text))
            continue
        row = item.row
        correct = None
        if question.answers:
            rule = plugins.load("evaluation.scores", "containment")()
            correct = bool(rule.best(row["answer"], question.answers))
        panel = Panel(method.name, "done", row["answer"], row["ttft_ms"], row["charged_budget"], correct)
        tokens = tuple(item.tokens) if item.answer.report else state.tokens
        yield replace(_with_panel(state, index, panel), tokens=tokens)


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
    return f"Blending began its answer {speed}, with {_words(blend, full)}; full reuse wrote {_words(reuse, full)}."


def _words(panel: Panel, full: Panel) -> str:
    return "the same words" if panel.text == full.text else "other words"


def _with_panel(state: DemoState, index: int, panel: Panel) -> DemoState:
    panels = list(state.panels)
    panels[index] = panel
    return replace(state, panels=tuple(panels))


class _ClosedError(RuntimeError):
    """The page was closed."""


def streamed(run: Callable[[Callable[[str], None]], Reply]) -> Iterator[Any]:
    """Run something that passes on text as it goes, in a thread of its own; yields the texts, then the result."""
    texts: SimpleQueue[str | None] = SimpleQueue()
    closed = threading.Event()

    def tell(text: str) -> None:
        if closed.is_set():
            raise _ClosedError("the page was closed")
        texts.put(text)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, tell)
        future.add_done_callback(lambda _: texts.put(None))
        try:
            yield from iter(texts.get, None)
            yield future.result()
        finally:
            closed.set()
