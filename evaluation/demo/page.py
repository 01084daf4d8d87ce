# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page itself. Gradio is imported when it is built; nothing is sent anywhere, and no font or script is fetched."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, HfBlendError, import_extra

from . import drawing
from .compare import Panel, Scene, again, compare
from .shelf import Shelf
from .visitors import Visitors
from .wish import Wish, selectors, stories

OWN = "my own text"
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}
QUEUE = {"concurrency_limit": 1, "concurrency_id": "model"}  # one answer at a time, so that times are comparable
HEAD = """# hf_blend: reuse the KV cache of documents
One question over documents, answered three ways. *Full prefill* reads everything anew. *Full reuse* takes the stored
KV of each document as it is, so documents never attended to each other. *Blend* recomputes a share of the tokens."""
EMPTY = Scene((Panel("full prefill"), Panel("full reuse"), Panel("blend")))


@dataclass
class Demo:
    """What the page does when something is pressed, without the page.

    Attributes:
        shelf: the models.
        visitors: limits and stores.
        model: name of the model that the page begins with; empty is the bundled one.
    """

    shelf: Shelf = field(default_factory=Shelf)
    visitors: Visitors = field(default_factory=Visitors)
    model: str = ""

    def ask(self, request: Any, model: str, wish: Wish) -> Iterator[Scene]:
        """Answer three ways.

        Args:
            request: of whom; Gradio's.
            model: its name.
            wish: what is asked for.

        Yields:
            Scenes; the last one says what went wrong, if something did.
        """
        yield from self._guarded(
            EMPTY, request, lambda store: compare(self.shelf.take(model), store, wish, self.visitors.limits)
        )

    def move(self, request: Any, model: str, wish: Wish, scene: Scene) -> Iterator[Scene]:
        """Blend once more at another ratio or with another selector, if something was asked before.

        Args:
            request: of whom; Gradio's.
            model: its name.
            wish: what is asked for now.
            scene: what is shown.

        Yields:
            Scenes.
        """
        if scene.panels[0].state != "done":
            yield scene
            return
        limits = self.visitors.limits
        yield from self._guarded(
            scene, request, lambda store: again(self.shelf.take(model), store, wish, limits, scene)
        )

    def _guarded(self, before: Scene, request: Any, run: Callable[[Any], Iterator[Scene]]) -> Iterator[Scene]:
        """Count the visitor, run, and turn a refusal into a scene."""
        try:
            self.visitors.admit(visitor_of(request))
            yield from run(self.visitors.store(request.session_hash or ""))
        except HfBlendError as error:
            yield Scene(before.panels, f"Sorry: {error}", failed=True)


def visitor_of(request: Any) -> str:
    """The address of a visitor: on a Space the one that the proxy adds, elsewhere that of the connection."""
    forwarded = request.headers.get("x-forwarded-for", "") if os.environ.get("SPACE_ID") else ""
    return forwarded.split(",")[0].strip() or (request.client.host if request.client else "")


def build(demo: Demo) -> Any:
    """Put the page together.

    Args:
        demo: what it does.

    Returns:
        A `gradio.Blocks`, not started.

    Raises:
        MissingExtraError: Gradio is not installed.
    """
    os.environ.update(QUIET)
    gradio = import_extra("gradio", extra="demo", wanted_by="the demo")
    with gradio.Blocks(title="hf_blend", analytics_enabled=False) as blocks:
        gradio.Markdown(HEAD)
        asking = _asking(gradio, demo)
        said = gradio.HTML(elem_id="hb-status")
        with gradio.Row(elem_id="hb-panels"):
            answers = [gradio.HTML(one, min_width=220) for one in drawing.panels(EMPTY)]
        marked = gradio.HTML(elem_id="hb-documents")
        with gradio.Accordion("How far stored KV is from a full prefill, layer by layer", open=True):
            heat = gradio.HTML(elem_id="hb-deviation")
        with gradio.Accordion("Answers against cost: 500 questions to the bundled model", open=True):
            gradio.HTML(drawing.quality(), elem_id="hb-quality")
        scene = gradio.State(EMPTY)
        _wire(gradio, demo, asking, [scene, said, *answers, marked, heat])
    blocks.queue(max_size=32, default_concurrency_limit=8)
    return blocks


def serve(demo: Demo, *, host: str = "127.0.0.1", port: int | None = None, wait: bool = True) -> tuple[Any, str]:
    """Start the page.

    Args:
        demo: what it does.
        host: where to listen; "0.0.0.0" for everybody.
        port: where to listen; None takes the first free one from 7860 on.
        wait: until it is interrupted.

    Returns:
        The `gradio.Blocks` and its address.

    Raises:
        ConfigError: Gradio cannot reach its own page.
    """
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
        "max_file_size": "1kb",
        "footer_links": [],
        "theme": gradio.themes.Default(**fonts),
        "css": (files(__package__) / "page.css").read_text("utf-8"),
    }
    try:
        _, url, _ = blocks.launch(server_name=host, server_port=port, **settings)
    except ValueError as error:
        raise ConfigError(
            f"the page was started on {host}, but Gradio cannot reach it there: {error} A proxy stands between where "
            "the address is not excepted: set NO_PROXY=localhost,127.0.0.1."
        ) from error
    return blocks, url


@dataclass(frozen=True)
class _Asking:
    """The controls."""

    model: Any
    story: Any
    try_these: Any
    documents: Any
    question: Any
    ratio: Any
    selector: Any
    button: Any

    @property
    def values(self) -> list[Any]:
        """Those whose values a question needs."""
        return [self.model, self.documents, self.question, self.ratio, self.selector]


def _asking(gradio: Any, demo: Demo) -> _Asking:
    told = stories()
    name, first = next(iter(told.items()))
    questions = list(first["questions"])
    with gradio.Row():
        with gradio.Column(min_width=280):
            story = gradio.Dropdown([*told, OWN], value=name, label="Documents", elem_id="hb-story")
            documents = gradio.Textbox(
                first["documents"], lines=8, max_lines=14, show_label=False, elem_id="hb-text",
                info="One document a line, or paragraphs with empty lines between them.",
            )  # fmt: skip
        with gradio.Column(min_width=280):
            try_these = gradio.Dropdown(questions, value=questions[0], label="Questions to try", elem_id="hb-try")
            question = gradio.Textbox(questions[0], label="Question", elem_id="hb-question")
            with gradio.Row():
                ratio = gradio.Slider(
                    0, 1, BlendConfig.recompute_ratio, step=0.01, label="Recompute ratio", elem_id="hb-ratio"
                )
                selector = gradio.Dropdown(
                    list(selectors()), value=BlendConfig.selector, label="Selector", elem_id="hb-selector"
                )
            model = gradio.Textbox(
                demo.model, label="Model", placeholder="empty: the bundled one", elem_id="hb-model",
                info="Hub id of a causal model" + (", or a folder" if demo.shelf.takes_folders else ""),
            )  # fmt: skip
            button = gradio.Button("Ask three ways", variant="primary", elem_id="hb-ask")
    return _Asking(model, story, try_these, documents, question, ratio, selector, button)


def _wire(gradio: Any, demo: Demo, asking: _Asking, outputs: list[Any]) -> None:
    """Say what happens when something is pressed, moved or picked."""

    def ask(request: gradio.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        for scene in demo.ask(request, str(values[0]), _wish(values)):
            yield _shown(scene)

    def move(request: gradio.Request, scene: Scene, *values: Any) -> Iterator[tuple[Any, ...]]:
        for now in demo.move(request, str(values[0]), _wish(values), scene):
            yield _shown(now)

    def pick(name: str) -> tuple[Any, ...]:
        story = stories().get(name, {"documents": "", "questions": {}})
        questions = list(story["questions"])
        first = questions[0] if questions else ""
        return story["documents"], gradio.update(choices=questions, value=first or None), first

    outputs_of_pick = [asking.documents, asking.try_these, asking.question]
    gradio.on([asking.button.click, asking.question.submit], ask, asking.values, outputs, api_name="ask", **QUEUE)
    moved = [asking.ratio.release, asking.selector.input]
    gradio.on(moved, move, [outputs[0], *asking.values], outputs, api_visibility="private", **QUEUE)
    asking.story.input(pick, [asking.story], outputs_of_pick, api_visibility="private")
    asking.try_these.input(lambda text: text or "", [asking.try_these], [asking.question], api_visibility="private")


def _wish(values: tuple[Any, ...]) -> Wish:
    _, documents, question, ratio, selector = values
    return Wish(documents or "", question or "", float(ratio or 0.0), str(selector or BlendConfig.selector))


def _shown(scene: Scene) -> tuple[Any, ...]:
    """The values of all outputs, in their order."""
    said = drawing.status(scene.status, "error" if scene.failed else "info")
    return (scene, said, *drawing.panels(scene), drawing.documents(scene), drawing.deviation(scene))
