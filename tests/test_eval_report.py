# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The page of a run has every row and point and nothing unescaped, and two runs are paired sample by sample."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from hf_blend.errors import ConfigError
from hf_blend.evaluation.report import html, plots
from hf_blend.evaluation.summary import compared

EVIL = "<script>alert('&')</script>"


def row(method="boundary", ratio=0.1, score=0.5, charged_budget=0.3, **fields):
    return {
        "task": "reference-world", "model": "reference", "method": method, "ratio": ratio, "n": 20, "score": score,
        "low": score - 0.1, "high": score + 0.1, "charged_budget": charged_budget, "ttft_ms": 40.0, **fields,
    }  # fmt: skip


ROWS = [
    row("full-prefill", None, 0.8, 1.0, ttft_ms=100.0),
    row("full-reuse", None, 0.2, 0.0, ttft_ms=10.0),
    row("boundary", 0.3, 0.7, 0.5, ttft_ms=60.0),
    row("boundary", 0.1, 0.6, 0.4, ttft_ms=50.0, difference=-0.2, difference_low=-0.3, difference_high=-0.1,
        normalised=2 / 3, exact_output=0.75, kl=0.0123, top1=0.9, rules={"word-f1": 0.61, "exact-match": 0.44}),
    row("random", 0.1, 0.3, 0.2, ttft_ms=None),
]  # fmt: skip
SUMMARY = {"settings": {"limit": 20, "seed": 1}, "rows": ROWS}


class Cells(HTMLParser):
    """Collects tags and the rows of tables."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.rows = []
        self.open = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += data


def table(summary):
    head, *body = Cells(html(summary)).rows
    return [dict(zip(head, cells, strict=True)) for cells in body]


def words(chart):
    """What a chart says."""
    found = [one for one in ElementTree.fromstring(chart).iter() if one.tag.endswith("}text")]
    return ["".join(one.itertext()).strip() for one in found]


@pytest.fixture
def drawn(monkeypatch):
    """What matplotlib is asked to draw: for each chart, method → x, y and reach of the interval."""
    figures = pytest.importorskip("matplotlib.axes", reason="the extra plot is not installed")
    charts = []
    errorbar = figures.Axes.errorbar

    def noted(axes, x, y, reach, label, **given):
        if not axes.has_data():
            charts.append({})
        charts[-1][label] = (x, y, tuple(map(tuple, reach)))
        return errorbar(axes, x, y, reach, label=label, **given)

    monkeypatch.setattr(figures.Axes, "errorbar", noted)
    return charts


def test_the_table_has_every_row_and_every_figure_that_any_row_has():
    found = table(SUMMARY)
    assert [one["method"] for one in found] == [one["method"] for one in ROWS]
    assert found[3] == {
        "method": "boundary", "ratio": "0.1", "n": "20", "score": "0.600 [0.500, 0.700]",
        "difference to full prefill": "-0.200 [-0.300, -0.100]", "normalised": "0.667", "charged budget": "40.0%",
        "first token, ms": "50.0", "same output": "75.0%", "same top token": "90.0%", "KL, nats": "0.012",
        "word-f1": "0.610", "exact-match": "0.440",
    }  # fmt: skip
    assert found[4]["first token, ms"] == found[4]["normalised"] == found[4]["word-f1"] == "-"
    assert found[0]["ratio"] == "-"


def test_plots_draw_each_row_as_a_point_of_its_methods_line_with_its_interval(drawn):
    charts = plots(SUMMARY)
    assert list(charts) == ["quality-charged-budget", "quality-ttft-ms"]
    charged, times = drawn
    assert {name: points[:2] for name, points in charged.items()} == {
        "full-prefill": ((1.0,), (0.8,)), "full-reuse": ((0.0,), (0.2,)), "boundary": ((0.4, 0.5), (0.6, 0.7)),
        "random": ((0.2,), (0.3,)),
    }, "in the order of ratios"  # fmt: skip
    assert all(reach == pytest.approx(0.1) for *_, ends in charged.values() for side in ends for reach in side)
    assert times["boundary"][0] == (50.0, 60.0)
    assert "random" not in times, "it has no time"
    assert words(charts["quality-charged-budget"]).count("full-prefill") == 2, "in the legend and at the point"
    assert list(plots({"rows": [row(ttft_ms=None)]})) == ["quality-charged-budget"]
    assert len(plots({"rows": [row(score=0.0, low=0.0, high=0.0, charged_budget=0.0, ttft_ms=0.0)]})) == 2


@pytest.mark.parametrize("field", ["task", "model", "method"])
def test_nothing_that_a_run_is_given_becomes_markup(field):
    summary = {"settings": {"data": EVIL}, "rows": [row(**{field: EVIL}, rules={EVIL: 0.5}), row()]}
    text = html(summary)
    assert EVIL not in text
    assert "script" not in Cells(text).tags
    for chart in plots(summary).values():
        assert EVIL not in chart
        ElementTree.fromstring(chart)


def test_the_page_needs_nothing_beside_itself():
    text = html(SUMMARY)
    page = Cells(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not {"src", "onload", "onclick"} & {name for name, _ in page.attributes}
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/(2000/svg|1999/xlink)\")", text)
    assert all(value.startswith("#") for name, value in page.attributes if name.endswith("href"))
    assert page.tags.count("svg") == 2
    assert '"limit": 20' in text.replace("&quot;", '"')
    assert "table" not in Cells(html({"settings": {}, "rows": []})).tags
    assert plots({"rows": []}) == {}


def written(folder, scores, model="one", method="boundary", ttft_ms=100.0, tail=""):
    """A folder with answers to samples 0, 1, 2, …; None leaves a sample out."""
    folder.mkdir()
    about = {"task": "needle", "model": model, "method": method, "ratio": 0.1, "ttft_ms": ttft_ms}
    lines = [{**about, "id": f"{n}", "score": score} for n, score in enumerate(scores) if score is not None]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail, "utf-8")
    return folder


def test_the_difference_is_paired_over_the_samples_that_both_answered(tmp_path):
    first = written(tmp_path / "a", [0, 1, 0, 1, None, 1] * 10, ttft_ms=100.0)
    second = written(tmp_path / "b", [1, 1, 0, 0, 1, None] * 10, ttft_ms=50.0, tail='{"task": "nee')
    (row,) = compared(first, second)
    assert row["n"] == 40
    assert row["first_better"] == 10
    assert row["second_better"] == 10
    assert row["difference"] == row["second_score"] - row["first_score"] == 0
    draws = np.random.default_rng(5).choice([1, 0, 0, -1], size=(4000, 40)).mean(axis=1)
    assert [row["low"], row["high"]] == pytest.approx(np.quantile(draws, [0.025, 0.975]), abs=0.04)
    assert row["speedup"] == 2
    assert compared(second, first)[0]["high"] == pytest.approx(-row["low"], abs=0.05)


def test_what_cannot_be_compared_is_refused(tmp_path, run):
    first = written(tmp_path / "a", [1])
    second = written(tmp_path / "b", [1], method="none")
    with pytest.raises(ConfigError, match="no answer in common"):
        compared(first, second)
    with pytest.raises(ConfigError, match=r"has no answers\.jsonl"):
        compared(first, tmp_path)
    for words, says in (((), "two runs, but there are 1"), ((first, "--chunk-tokens", 64), "is --chunk-tokens, too")):
        code, _, err = run("eval", "compare", first, *words)
        assert code == 2
        assert says in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"score": 1}', '{"score": null}', '{"score": NaN}', '{"ratio": [1]}', "\udcff"]
)
def test_a_line_that_is_no_answer_is_refused_by_name(tmp_path, line):
    about = {"task": "needle", "model": "one", "method": "boundary", "ratio": 0.1, "id": "7", "score": 1}
    if line.startswith("{") and line != '{"score": 1}':
        line = json.dumps({**about, **json.loads(line)})
    first = written(tmp_path / "a", [1])
    second = written(tmp_path / "b", [1])
    with (second / "answers.jsonl").open("ab") as file:
        file.write(f"{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="has a damaged line"):
        compared(first, second)


def test_the_command_line_compares_two_folders(tmp_path, run):
    first = written(tmp_path / "a", [0, 0])
    second = written(tmp_path / "b", [1, 0])
    code, out, _ = run("eval", "compare", first, second, "--json")
    assert code == 0
    assert json.loads(out)[0]["difference"] == 0.5
