# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page itself. Gradio is imported when it is built; nothing is sent anywhere, and no font or script is fetched."""

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, HfBlendError, PromptError, import_extra

from . import drawing
from .compare import DemoState, Panel, compare
from .loaded import Loaded
from .request import DemoRequest, first_request, handbook, page_questions, selectors
from .visitors import PUBLIC, Visitors

QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
QUEUE = {"concurrency_limit": 1, "concurrency_id": "model"}  # one answer at a time, so that times are comparable
HEAD = """<h1>hf_blend</h1><p>One question over documents that a model read before. <b>Blending</b> reuses what it
stored of them, and recomputes some tokens.</p>"""
CHOSEN = """<p class="hb-legend">The first question was chosen: on most, so small a model hardly tells the three ways
apart. <b>Quality</b> shows the error.</p>"""
QUALITY = """What the default rule leaves of the error, at two costs, and how much earlier the first token comes. The
error is how far next-token distributions are from full prefill's (KL divergence): 0 is full prefill, 1 is reuse
alone."""
WORK = f'<p class="hb-legend"><b>Work</b>: {drawing.WORK[0].lower()}{drawing.WORK[1:]}</p>'
COLOURS = {  # with white on them, or on white, a contrast of 4.5 or more
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "color_accent": "*primary_700",
}
EMPTY = DemoState((Panel("full prefill"), Panel("full reuse"), Panel("blend")))


@dataclass
class Demo:
    """What the page does when something is pressed, without the page."""

    loaded: Loaded
    visitors: Visitors = field(default_factory=Visitors)

    def opening(self) -> DemoState:
        """Answer what the page begins with; a model that reads less than the handbook has is no obstacle."""
        try:
            *_, state = compare(self.loaded, self.visitors.store(PUBLIC), first_request(), self.visitors.limits)
            return state
        except PromptError as error:
            return replace(EMPTY, status=str(error), failed=True)

    def ask(self, request: Any, query: DemoRequest) -> Iterator[DemoState]:
        """Count the visitor, answer three ways, and turn a refusal into a state."""
        try:
            self.visitors.admit(visitor_of(request))
            session = PUBLIC if query.documents == handbook() else request.session_hash or ""
            yield from compare(self.loaded, self.visitors.store(session), query, self.visitors.limits)
        except HfBlendError as error:
            yield replace(EMPTY, status=f"Sorry: {error}", failed=True)


def visitor_of(request: Any) -> str:
    """The address of a visitor: on a Space the one that the proxy adds, elsewhere that of the connection."""
    if os.environ.get("SPACE_ID"):
        forwarded = request.headers.get("x-forwarded-for", "").split(",")[0].strip()
        if forwarded:
            return str(forwarded)
    return request.client.host if request.client else ""


def build(demo: Demo) -> Any:
    """Make the page."""
    os.environ.update(QUIET)
    gradio = import_extra("gradio", extra="demo", needed_by="the demo")
    state = demo.opening()
    with gradio.Blocks(title="hf_blend", analytics_enabled=False) as blocks:
        gradio.HTML(HEAD, elem_id="hb-head", padding=False)
        with gradio.Tabs():
            with gradio.Tab("Ask", id="ask"):
                _form(gradio, demo, state)
            with gradio.Tab("Quality", id="quality"):
                gradio.Markdown(QUALITY)
                chart = base64.b64encode((files(__package__) / "quality.svg").read_bytes()).decode()
                picture = f'<img alt="error and first token, by rule" src="data:image/svg+xml;base64,{chart}">'
                gradio.HTML(picture, elem_id="hb-quality")
    blocks.queue(max_size=32, default_concurrency_limit=8)
    return blocks


def serve(demo: Demo, *, host: str = "127.0.0.1", port: int | None = None, wait: bool = True) -> tuple[Any, str]:
    """Start the page; gives it and its address."""
    blocks = build(demo)
    gradio = import_extra("gradio", extra="demo", needed_by="the demo")
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    try:
        _, url, _ = blocks.launch(
            server_name=host,
            server_port=port,
            prevent_thread_lock=not wait,
            quiet=not wait,
            share=False,
            show_error=False,
            ssr_mode=False,
            enable_monitoring=False,
            footer_links=[],
            theme=gradio.themes.Default(primary_hue="blue", **fonts).set(**COLOURS),
            css="".join((files(__package__) / name).read_text("utf-8") for name in ("figure.css", "page.css")),
        )
    except ValueError as error:
        raise ConfigError(
            f"the page was started on {host}, but Gradio cannot reach it there: {error} A proxy is between where "
            "the address is not excepted: set NO_PROXY=localhost,127.0.0.1."
        ) from error
    return blocks, url


def _form(gradio: Any, demo: Demo, state: DemoState) -> None:
    """The question, its answers and its settings, answered by the time they are seen."""
    query = first_request()
    with gradio.Row(elem_classes="hb-asking", equal_height=True):
        question = gradio.Textbox(
            query.question, label="Question: type another", elem_id="hb-question", scale=5, min_width=240
        )
        picked = gradio.Dropdown(
            list(page_questions()), value=None, label="or pick one", elem_id="hb-pick", scale=3, min_width=240
        )
        button = gradio.Button("Ask three ways", variant="primary", elem_id="hb-ask", scale=1, min_width=150)
    values = _shown(state)
    status = gradio.HTML(values[0], elem_id="hb-status", padding=False)
    with gradio.Column(elem_id="hb-panels", elem_classes="hb-panels"):
        answers = [gradio.HTML(answer, padding=False) for answer in values[1:4]]
    gradio.HTML(CHOSEN, padding=False)
    with gradio.Row():
        ratio = gradio.Slider(0, 1, query.recompute_ratio, step=0.01, label="Recompute ratio", elem_id="hb-ratio")
        selector = gradio.Dropdown(
            list(selectors()), value=BlendConfig.selector, label="Selector", elem_id="hb-selector"
        )
    gradio.HTML(WORK, padding=False)
    documents = gradio.Textbox(
        query.documents,
        lines=4,
        max_lines=4,
        elem_id="hb-text",
        label="Documents, which may be yours: one a line, or paragraphs with empty lines between them",
    )
    marked = gradio.HTML(values[4], elem_id="hb-documents", padding=False)

    inputs = [documents, question, ratio, selector]
    outputs = [status, *answers, marked]

    def ask(request: gradio.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        for state in demo.ask(request, _request(*values)):
            yield _shown(state)

    gradio.on([button.click, question.submit], ask, inputs, outputs, api_name="ask", **QUEUE)
    private = {"api_visibility": "private"}
    taken = picked.input(lambda text: (text, None), [picked], [question, picked], **private)
    taken.then(ask, inputs, outputs, **private, **QUEUE)


def _request(documents: str | None, question: str | None, ratio: float | None, selector: str | None) -> DemoRequest:
    """What is asked, by the values of the controls, which may be empty."""
    return DemoRequest(documents or "", question or "", float(ratio or 0.0), selector or BlendConfig.selector)


def _shown(state: DemoState) -> tuple[Any, ...]:
    """The values of all outputs, in their order."""
    status = drawing.status(state.status, "error" if state.failed else "info")
    return (status, *drawing.panels(state), drawing.marked(state))
