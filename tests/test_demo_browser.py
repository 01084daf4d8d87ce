# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, as visitors see it. `$HF_BLEND_ARTEFACTS` says where screenshots are left."""

import importlib.util
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import REFERENCE, reference_questions

from hf_blend.evaluation.demo.compare import compare
from hf_blend.evaluation.demo.loaded import load_exact
from hf_blend.evaluation.demo.page import Demo, serve
from hf_blend.evaluation.demo.request import DemoRequest, first_request
from hf_blend.evaluation.demo.visitors import Limits, Visitors
from tests.asking import memory

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = [name for name in ("playwright", "gradio") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: pip install hf-blend[dev]"),
]

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
WAIT_MS = 90_000  # a busy machine
STORY = [one for one in reference_questions() if one["story"] == 1]
TEXT = "".join(STORY[0]["chunks"]).rstrip()
ANSWERS = {row["question"]: row["answer"] for row in STORY}
FIRST = next(iter(ANSWERS))
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
METHODS = ("full prefill", "full reuse", "blend")


@pytest.fixture(scope="module")
def demo():
    return Demo(load_exact(REFERENCE), Visitors(Limits(answers_per_minute=200)))


@pytest.fixture(scope="module")
def opened(demo):
    """Answers that the page is shown with, of a small model; the handbook is more than it reads."""
    asked = DemoRequest(TEXT, FIRST, 0.3, "kv-deviation")
    with memory() as store:
        *_, state = compare(demo.loaded, store, asked, demo.visitors.limits)
    panels = []
    for panel in state.panels:
        panels.append(replace(panel, correct=panel.text == ANSWERS[FIRST]))
    return replace(state, panels=tuple(panels))


@pytest.fixture(scope="module")
def url(demo, opened):
    """A running page."""
    demo.opening = lambda: opened
    blocks, address = serve(demo, wait=False)
    yield address
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    folder = Path(os.environ.get("HF_BLEND_ARTEFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def visit(browser, url):
    """Open the page; at the end nothing was fetched from elsewhere, and the console has no errors."""
    complaints = []
    fetched = []

    def hear(message):
        if message.type == "error":
            complaints.append(message.text)

    def come(size):
        page = browser.new_page(viewport=size)
        page.set_default_timeout(WAIT_MS)
        page.on("console", hear)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(url)
        page.locator("#hb-ask").wait_for()
        return page

    yield come
    assert complaints == []
    for address in fetched:
        assert address.startswith((url, "data:", "blob:"))


@pytest.mark.parametrize("size", [DESKTOP, pytest.param(PHONE, marks=pytest.mark.slow)], ids=["desktop", "phone"])
def test_page_opens_with_question_counts_bars_and_tokens(visit, opened, artefacts, size):
    page = visit(size)
    fold = size["height"] if size is DESKTOP else 1.2 * size["height"]
    bars = []
    for method, panel, mark in zip(METHODS, opened.panels, ("right", "wrong", "right"), strict=True):
        shown = page.locator(f'#hb-panels [data-method="{method}"][data-state="done"]')
        shown.wait_for()
        assert shown.locator(".hb-answer").inner_text().strip() == panel.text
        assert shown.locator(".hb-right, .hb-wrong").inner_text() == mark
        box = shown.bounding_box()
        assert box["y"] + box["height"] <= fold, method
        bar = shown.locator(".hb-bar").bounding_box()
        bars.append(bar)
        assert round(bar["x"]) == round(bars[0]["x"]), "they begin at one line"
        share = panel.ttft_ms / opened.panels[0].ttft_ms
        assert bar["width"] / bars[0]["width"] == pytest.approx(share, abs=0.05)
    assert page.locator("#hb-documents .hb-tokens .hb-chosen").count() > 0, "the tokens are shown"
    assert page.evaluate("() => document.documentElement.scrollWidth") <= size["width"]
    question = page.locator("#hb-question textarea, #hb-question input").first
    assert question.input_value() == first_request().question
    page.screenshot(path=artefacts / f"start-{size['width']}.png", full_page=True)
