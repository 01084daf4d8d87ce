# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page's parts as HTML. Whatever came from a visitor or a model is escaped here, and nowhere left out."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from torch import nn

from hf_blend import BlendConfig, ChunkStore

from ..answering import build_request
from ..asking import Pipeline, Question
from ..retrieving import closed
from .compare import DemoState, Panel, Passage, answer_three_ways

NOTES = {
    "full prefill": "reads every document again",
    "full reuse": "takes what was stored as it is",
    "blend": "takes it, recomputes some tokens",
}
WORK = "All computing on the tokens of the documents, choosing included, as a share of a full prefill's."
NEW_TOKENS = 48  # of each answer in a figure
MOST_TOKENS = 3000  # that are shown one by one
SAME = '<span class="hb-right">same words</span>'
OTHER = '<span class="hb-other">other words</span>'
PLACEHOLDERS = {"done": "<i>(nothing)</i>", "writing": ""}
RIGHT = {True: '<span class="hb-right">right</span>', False: '<span class="hb-wrong">wrong</span>', None: ""}


def panel(answer: Panel, full: Panel | None = None, longest_ms: float = 0.0) -> str:
    """One answer, and a bar for the time to its first token beside the longest."""
    text = escape(answer.text) or PLACEHOLDERS.get(answer.state, "<i>not asked yet</i>")
    caret = '<span class="hb-caret">▍</span>' if answer.state == "writing" else ""
    method = escape(answer.method)
    share = 0.0
    if answer.ttft_ms:
        share = answer.ttft_ms / (longest_ms or answer.ttft_ms)
    return (
        f'<section class="hb-panel" data-method="{method}" data-state="{answer.state}" aria-label="{method}">'
        f"<div><h2>{method} {_judged(answer, full)}</h2>"
        f'<p class="hb-note">{NOTES.get(answer.method, "")}</p></div>'
        f'<p class="hb-answer">{text}{caret}</p>'
        f'<div><div class="hb-bar" style="width:{share:.1%}"></div>'
        f'<p class="hb-figures">{_figures(answer, full)}</p></div></section>'
    )


def panels(state: DemoState) -> tuple[str, ...]:
    """All answers, one above the other; their bars have one scale."""
    longest = max((answer.ttft_ms or 0.0 for answer in state.panels), default=0.0)
    return tuple(panel(answer, state.panels[0], longest) for answer in state.panels)


def status(text: str, kind: str = "info") -> str:
    """One sentence above the answers; `kind` is info or error."""
    role = "alert" if kind == "error" else "status"
    return f'<p class="hb-status hb-{kind}" role="{role}">{escape(text)}</p>' if text else ""


def marked(state: DemoState) -> str:
    """The documents beside their titles, with the recomputed tokens framed."""
    if not state.tokens:
        return ""
    passages = []
    for passage in state.passages or (Passage("", 0, len(state.tokens)),):
        tokens = state.tokens[passage.start : min(passage.stop, MOST_TOKENS)]
        if tokens:
            shown = "".join(_token(text, is_chosen) for text, is_chosen in tokens)
            passages.append(f'<div class="hb-passage"><b>{escape(passage.name)}</b><div>{shown}</div></div>')
    more = len(state.tokens) - MOST_TOKENS
    if more > 0:
        passages.append(f"<p>… and {more:,} tokens more</p>")
    chosen = sum(is_chosen for _, is_chosen in state.tokens)
    return (
        f'<p class="hb-legend"><b class="hb-chosen">framed</b>: recomputed, {chosen} of {len(state.tokens)} tokens</p>'
        f'<div class="hb-tokens" tabindex="0" role="region" aria-label="tokens of the documents">'
        f"{''.join(passages)}</div>"
    )


def figure(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    documents: Sequence[str],
    question: str,
    config: BlendConfig | None = None,
) -> str:
    """Answer three ways, and draw it as an HTML document that fetches nothing: for a notebook.

    Args:
        model: a model that can be blended.
        tokenizer: its tokenizer.
        store: where the documents are stored, or will be.
        documents: two or more.
        question: about them.
        config: how to blend; the defaults if left out.
    """
    request = build_request(tokenizer, [closed(text) for text in documents], question, None)
    pipeline = Pipeline(model, tokenizer, store)
    *_, state = answer_three_ways(pipeline, Question(question, request), config or BlendConfig(), NEW_TOKENS)
    css = (files(__package__) / "figure.css").read_text("utf-8")
    heading = escape(question)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>{heading}</title><style>{css}</style></head><body><main class="hb-figure"><h1>{heading}</h1>'
        f"{status(state.status)}{''.join(panels(state))}{marked(state)}</main></body></html>\n"
    )


def _judged(answer: Panel, full: Panel | None) -> str:
    """Right or wrong; where the right answer is not known, whether the words are those of a full prefill."""
    if answer.correct is not None or full is None or full is answer:
        return RIGHT[answer.correct]
    if answer.state != "done" or full.state != "done":
        return ""
    return SAME if answer.text == full.text else OTHER


def _figures(answer: Panel, full: Panel | None) -> str:
    if answer.ttft_ms is None:
        return "&nbsp;"
    parts = [f"first token after <b>{_duration(answer.ttft_ms)}</b>"]
    if full and full.ttft_ms and full.method != answer.method:
        parts.append(f"{full.ttft_ms / answer.ttft_ms:.1f} x as fast")
        if answer.charged is not None:
            parts.append(f'<span title="{WORK}">{answer.charged:.0%} of the work</span>')
    return " · ".join(parts)


def _duration(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _token(text: str, is_chosen: bool) -> str:
    name = "hb-token hb-chosen" if is_chosen else "hb-token"
    visible = escape(text).strip("\n") or "⏎"
    breaks = "<br>" * text.count("\n")
    return f'<span class="{name}">{visible}</span> {breaks}'
