# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page's parts as HTML. Whatever came from a visitor or a model is escaped here, and nowhere left out."""

from collections.abc import Iterator, Sequence
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
DARK = 0.81  # of the heat scale, from where on white text is read better
NEW_TOKENS = 48  # of each answer in a figure
MOST_TOKENS = 3000  # that are shown one by one
SAME = '<span class="hb-right">same words</span>'
OTHER = '<span class="hb-other">other words</span>'
RIGHT = {True: '<span class="hb-right">right</span>', False: '<span class="hb-wrong">wrong</span>', None: ""}


def panel(answer: Panel, full: Panel | None = None, longest_ms: float = 0.0) -> str:
    """One answer, and a bar for the time to its first token beside the longest."""
    dots = '<span class="hb-caret">▍</span>' if answer.state == "writing" else ""
    text = escape(answer.text) or {"done": "<i>(nothing)</i>", "writing": ""}.get(answer.state, "<i>not asked yet</i>")
    share = (answer.ttft_ms or 0.0) / (longest_ms or answer.ttft_ms or 1.0)
    return (
        f'<section class="hb-panel" data-method="{escape(answer.method)}" data-state="{answer.state}" '
        f'aria-label="{escape(answer.method)}"><div>'
        f"<h2>{escape(answer.method)} {_judged(answer, full)}</h2>"
        f'<p class="hb-note">{NOTES.get(answer.method, "")}</p></div>'
        f'<p class="hb-answer">{text}{dots}</p>'
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
    """The passages beside their sources: recomputed tokens framed, the darker the further off their stored KV is."""
    if not state.tokens:
        return ""
    worst = [max(column) for column in zip(*state.deviation, strict=True)]
    largest = max(worst, default=0.0) or 1.0
    off = {column: value / largest for column, value in zip(state.columns, worst, strict=True)}
    more = len(state.tokens) - MOST_TOKENS
    taken = sum(chosen for _, chosen in state.tokens)
    left = f"<p>… and {more:,} tokens more</p>" if more > 0 else ""
    return (
        f'<p class="hb-legend"><b class="hb-chosen">framed</b>: recomputed, {taken} of {len(state.tokens)} tokens. '
        f"The darker, the further its stored KV is from that of a full prefill.</p>"
        f'<div class="hb-tokens" tabindex="0" role="region" aria-label="tokens of the documents">'
        f"{''.join(_passages(state, off))}{left}</div>"
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
    return figure_of(Pipeline(model, tokenizer, store), Question(question, request), config or BlendConfig())


def figure_of(pipeline: Pipeline, question: Question, config: BlendConfig) -> str:
    """`figure` of a prompt that is made already."""
    *_, state = answer_three_ways(pipeline, question, config, NEW_TOKENS)
    css, heading = (files(__package__) / "figure.css").read_text("utf-8"), escape(question.name)
    body = f"<h1>{heading}</h1>{status(state.status)}{''.join(panels(state))}{marked(state)}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{heading}</title><style>{css}</style></head>"
        f'<body><main class="hb-figure">{body}</main></body></html>\n'
    )


def heat(share: float) -> str:
    """A colour from pale yellow (0) over orange to dark red (1)."""
    share = min(max(share, 0.0), 1.0)
    stops = ((255, 251, 235), (251, 191, 36), (153, 27, 27))
    first, second, between = (stops[0], stops[1], share * 2) if share < 0.5 else (stops[1], stops[2], share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * between):02x}" for a, b in zip(first, second, strict=True))


def _passages(state: DemoState, off: dict[int, float]) -> Iterator[str]:
    """Each passage with its name, as far as tokens are shown."""
    for passage in state.passages or (Passage("", 0, len(state.tokens)),):
        places = range(passage.start, min(passage.stop, len(state.tokens), MOST_TOKENS))
        tokens = "".join(_token(place, *state.tokens[place], off.get(place)) for place in places)
        if tokens:
            yield f'<div class="hb-passage"><b>{escape(passage.name)}</b><div>{tokens}</div></div>'


def _judged(answer: Panel, full: Panel | None) -> str:
    """Right or wrong; where the right answer is not known, whether the words are those of a full prefill."""
    if answer.correct is not None or full is None or full is answer or {answer.state, full.state} != {"done"}:
        return RIGHT[answer.correct]
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


def _token(place: int, text: str, chosen: bool, share: float | None) -> str:
    ground = "" if share is None else f"background:{heat(share)};color:{'#fff' if share > DARK else '#000'}"
    said = f"token {place}" + ("" if share is None else f", deviation {share:.0%} of the largest")
    name = "hb-token hb-chosen" if chosen else "hb-token"
    broken = "<br>" * text.count("\n")
    return f'<span class="{name}" style="{ground}" title="{said}">{escape(text).strip(chr(10)) or "⏎"}</span> {broken}'
