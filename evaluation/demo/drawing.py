# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page's parts as HTML. Whatever came from a visitor or a model is escaped here, and nowhere left out."""

from collections.abc import Sequence
from html import escape

from .compare import DemoState, Panel

NOTES = {
    "full prefill": "The model reads every document again: the reference.",
    "full reuse": "What the model stored of each document is used as it is.",
    "blend": "What it stored is used, and some tokens are computed again.",
}
WORK = "All computing on the tokens of the documents, choosing included, as a share of a full prefill's."
DARK = 0.81  # of the heat scale, from where on white text is read better
MOST_TOKENS = 3000  # that are shown one by one
SAME = '<span class="hb-right">same words</span>'
OTHER = '<span class="hb-other">other words</span>'
RIGHT = {True: '<span class="hb-right">right</span>', False: '<span class="hb-wrong">wrong</span>', None: ""}


def panel(answer: Panel, full: Panel | None = None) -> str:
    """One answer."""
    dots = '<span class="hb-caret">▍</span>' if answer.state == "writing" else ""
    text = escape(answer.text) or {"done": "<i>(nothing)</i>", "writing": ""}.get(answer.state, "<i>not asked yet</i>")
    return (
        f'<section class="hb-panel" data-method="{escape(answer.method)}" data-state="{answer.state}" '
        f'aria-label="{escape(answer.method)}">'
        f"<h2>{escape(answer.method)} {_judged(answer, full)}</h2>"
        f"<p class='hb-note'>{NOTES.get(answer.method, '')}</p>"
        f'<p class="hb-answer">{text}{dots}</p><p class="hb-figures">{_figures(answer, full)}</p></section>'
    )


def panels(state: DemoState) -> tuple[str, ...]:
    """All answers, side by side."""
    return tuple(panel(answer, state.panels[0]) for answer in state.panels)


def status(text: str, kind: str = "info", sources: Sequence[str] = ()) -> str:
    """One sentence above the answers, and the files they are from; `kind` is info or error."""
    role = "alert" if kind == "error" else "status"
    named = f"<br>Sources: {escape(', '.join(sources))}" if sources else ""
    return f'<p class="hb-status hb-{kind}" role="{role}">{escape(text)}{named}</p>' if text else ""


def documents(state: DemoState) -> str:
    """The documents: recomputed tokens framed, the ground the darker the further stored KV is off."""
    if not state.tokens:
        return ""
    worst = [max(column) for column in zip(*state.deviation, strict=True)]
    largest = max(worst, default=0.0) or 1.0
    off = {column: value / largest for column, value in zip(state.columns, worst, strict=True)}
    tokens = "".join(_token(place, *pair, off.get(place)) for place, pair in enumerate(state.tokens[:MOST_TOKENS]))
    more = len(state.tokens) - MOST_TOKENS
    taken = sum(chosen for _, chosen in state.tokens)
    left = f"<p>… and {more:,} tokens more</p>" if more > 0 else ""
    return (
        f'<p class="hb-legend"><b class="hb-chosen">framed</b>: recomputed, {taken} of {len(state.tokens)} tokens. '
        f"The darker, the further its stored KV is from that of a full prefill.</p>"
        f'<div class="hb-tokens">{tokens}</div>{left}'
    )


def heat(share: float) -> str:
    """A colour from pale yellow (0) over orange to dark red (1)."""
    share = min(max(share, 0.0), 1.0)
    stops = ((255, 251, 235), (251, 191, 36), (153, 27, 27))
    first, second, between = (stops[0], stops[1], share * 2) if share < 0.5 else (stops[1], stops[2], share * 2 - 1)
    return "#" + "".join(f"{round(a + (b - a) * between):02x}" for a, b in zip(first, second, strict=True))


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
