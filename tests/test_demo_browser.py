# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, as visitors see it. `$HF_BLEND_ARTEFACTS` says where screenshots are left."""

import os
import shutil
from pathlib import Path

import pytest

from hf_blend.evaluation.demo.page import Demo, serve
from hf_blend.evaluation.demo.visitors import Limits, Visitors
from hf_blend.evaluation.demo.wish import stories

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytest.importorskip("gradio", reason="gradio is not installed: pip install hf-blend[demo]")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
WAIT_MS = 30_000
HOSTILE = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>\n\"><svg onload=alert(1)>"
STORIES = list(stories().values())


@pytest.fixture(scope="module")
def url():
    """A running page."""
    blocks, address = serve(Demo(visitors=Visitors(Limits(answers_per_minute=200))), wait=False)
    yield address
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory):
    folder = Path(os.environ.get("HF_BLEND_ARTEFACTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Visit:
    """One visitor's page, with all that its console said and all that it fetched."""

    def __init__(self, browser, url, width=1280, height=1100):
        self.context = browser.new_context(viewport={"width": width, "height": height})
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.complaints, self.fetched = [], []
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(url)
        self.page.locator("#hb-ask").wait_for()

    def ask(self):
        self.page.locator("#hb-ask").click()

    def panel(self, method):
        return self.page.locator(f'[data-method="{method}"]')

    def answer(self, method):
        """The answer, once it is whole."""
        self.page.locator(f'[data-method="{method}"][data-state="done"]').wait_for()
        return self.panel(method).locator(".hb-answer").inner_text().strip()

    def write(self, place, text):
        self.page.locator(f"{place} textarea, {place} input").first.fill(text)

    def chosen(self):
        return self.page.locator("#hb-documents .hb-tokens .hb-chosen").count()


@pytest.fixture
def visit(browser, url):
    """Open the page; at the end nothing was fetched from elsewhere, and the console has no errors."""
    opened = []

    def come(**size):
        opened.append(Visit(browser, url, **size))
        return opened[-1]

    yield come
    for one in opened:
        one.context.close()
        assert one.complaints == []
        assert [address for address in one.fetched if not address.startswith((url, "data:", "blob:"))] == []


def test_the_page_comes_up_with_a_story_and_the_chart(visit, artefacts):
    seen = visit()
    seen.page.locator("#hb-quality circle").nth(9).wait_for()
    sync_api.expect(seen.page.locator("#hb-text textarea")).to_have_value(STORIES[0]["documents"])
    seen.page.screenshot(path=artefacts / "1-start.png", full_page=True)


def test_asking_gives_three_answers_and_marks_what_was_recomputed(visit, artefacts):
    seen = visit()
    seen.ask()
    wanted = next(iter(STORIES[0]["questions"].values()))
    assert seen.answer("full prefill") == wanted
    assert seen.answer("blend") == wanted
    assert seen.answer("full reuse")
    assert "ms" in seen.panel("full reuse").locator(".hb-figures").inner_text()
    seen.page.locator("#hb-deviation rect").first.wait_for()
    seen.page.locator("#hb-documents .hb-tokens .hb-chosen").first.wait_for()
    seen.page.screenshot(path=artefacts / "2-answers.png", full_page=True)


def test_an_answer_grows_while_it_is_written(visit, model_folder):
    seen = visit()
    seen.page.evaluate(
        "() => { window.lengths = new Set(); new MutationObserver(() => document.querySelectorAll("
        "'[data-method=blend] .hb-answer').forEach(one => window.lengths.add(one.innerText.length)))"
        ".observe(document.body, {subtree: true, childList: true, characterData: true}) }"
    )
    seen.write("#hb-model", model_folder)
    seen.ask()
    seen.answer("blend")
    assert len(seen.page.evaluate("() => [...window.lengths]")) > 4


def test_another_story_brings_its_own_questions(visit):
    seen = visit()
    seen.page.locator("#hb-story input").click()
    seen.page.get_by_role("option", name="Story 3").click()
    first = next(iter(STORIES[2]["questions"]))
    sync_api.expect(seen.page.locator("#hb-question textarea, #hb-question input").first).to_have_value(first)
    seen.ask()
    assert seen.answer("full prefill") == STORIES[2]["questions"][first]


def test_moving_the_slider_blends_again_and_leaves_the_others(visit, artefacts):
    seen = visit()
    seen.ask()
    seen.answer("blend")
    seen.page.locator("#hb-deviation rect").first.wait_for()
    few, full = seen.chosen(), seen.panel("full prefill").inner_text()
    slider = seen.page.locator("#hb-ratio input[type=range]")
    box = slider.bounding_box()
    seen.page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    seen.page.wait_for_function(
        "few => document.querySelectorAll('#hb-documents .hb-tokens .hb-chosen').length > few", arg=few
    )
    assert seen.answer("blend")
    assert seen.panel("full prefill").inner_text() == full
    seen.page.screenshot(path=artefacts / "3-slider.png", full_page=True)


def test_hostile_text_is_only_text(visit, artefacts):
    seen = visit()
    seen.write("#hb-text", f"{HOSTILE}\nRolf bought a satchel too.")
    seen.write("#hb-question", HOSTILE.replace("\n", " "))
    seen.ask()
    seen.answer("blend")
    assert seen.page.evaluate("() => window.broken") is None
    assert seen.page.locator("#hb-documents script, #hb-panels script, #hb-panels img").count() == 0
    seen.page.locator("#hb-status", has_text="not among them").wait_for()
    seen.write("#hb-model", "<img src=x onerror='window.broken = 1'>")
    seen.ask()
    seen.page.locator(".hb-error").wait_for()
    assert seen.page.evaluate("() => window.broken") is None
    assert "is no model id" in seen.page.locator(".hb-error").inner_text()
    seen.page.screenshot(path=artefacts / "4-hostile.png", full_page=True)


def test_a_huge_text_is_refused_with_a_sentence_and_the_page_goes_on(visit):
    seen = visit()
    seen.write("#hb-text", "Rolf bought a satchel too. " * 40_000)
    seen.ask()
    seen.page.locator(".hb-error").wait_for()
    assert "1,080,000 letters" in seen.page.locator(".hb-error").inner_text()
    seen.write("#hb-text", STORIES[0]["documents"])
    seen.ask()
    assert seen.answer("full prefill") == next(iter(STORIES[0]["questions"].values()))


def test_two_visitors_at_once_get_each_their_own_answer(visit):
    first, second = visit(), visit()
    other = list(STORIES[0]["questions"])[1]
    second.write("#hb-question", other)
    first.ask()
    second.ask()
    assert first.answer("blend") == next(iter(STORIES[0]["questions"].values()))
    assert second.answer("full prefill") == STORIES[0]["questions"][other]
    assert second.answer("blend")


def test_it_fits_a_phone(visit, artefacts):
    seen = visit(width=375, height=812)
    seen.ask()
    seen.answer("blend")
    seen.page.locator("#hb-deviation rect").first.wait_for()
    seen.page.screenshot(path=artefacts / "5-phone.png", full_page=True)
    assert seen.page.evaluate("() => document.documentElement.scrollWidth") <= 375
    boxes = [seen.panel(name).bounding_box() for name in ("full prefill", "full reuse", "blend")]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    assert all(box["width"] > 280 for box in boxes)
