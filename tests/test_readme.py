# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the README says is so: its numbers come from the committed results, its links and commands exist."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from hf_blend.cli.main import commands, main
from hf_blend.evaluation.bundled import long_questions
from hf_blend.evaluation.readme import PLACE, filled

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
SHOWN = {"support"}
MOST_LINES = 150


def test_the_tables_are_those_of_the_committed_results():
    assert set(PLACE.findall(README)) == SHOWN
    assert filled(README, ROOT / "benchmarks" / "results") == README


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_the_numbers_in_the_text_are_those_of_the_committed_results():
    ttft = result("ttft")
    blended = next(row for row in ttft["rows"] if row["ratio"] == 0.15)
    short = set(result("break_even")["break_even_tokens"].values())
    for said in (
        f"a prompt of {blended['prompt_tokens']:,} tokens",
        f"{ttft['full']['ttft_ms'] / 1e3:.1f} s by full prefill",
        f"and after {blended['ttft_ms'] / 1e3:.1f} s by blending",
        f"from about {min(short)} tokens on",
    ):
        assert said in " ".join(README.split()), said


def test_the_page_is_read_in_some_minutes():
    assert len(README.splitlines()) <= MOST_LINES


def test_the_output_that_is_shown_is_what_the_command_prints(capsys, tmp_path, monkeypatch):
    asked = long_questions()[:1]
    monkeypatch.setattr("hf_blend.evaluation.bundled.long_questions", lambda: asked)
    (block,) = re.findall(r"```console\n\$ hf-blend ask --compare --rounds 5\n(.*?)```", README, re.DOTALL)
    with pytest.raises(SystemExit):
        main(["ask", "--compare", "--store", str(tmp_path)])
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines() if line.count("\t") == 5]
    shown = [re.split(r"  +", line) for line in block.splitlines()]
    but_for_time = [[*line[:4], line[5]] for line in printed]
    assert [[*line[:4], line[5]] for line in shown] == but_for_time


def test_the_figures_behind_the_advice_are_those_of_the_file(tmp_path):
    found = {"model": "m", "half": "both", "kl_first": 0.17, "n": 9, "low": 0.28, "high": 0.47, "ttft_ms": 1500}
    rows = [
        {**found, "task": "a", "selector": "auto", "charged": 0.151, "kl": 0.98, "target": 0.15},
        {**found, "task": "a", "selector": "boundary", "charged": 0.151, "kl": 0.37, "target": 0.15},
        {**found, "task": "b", "selector": "boundary", "charged": 0.139, "kl": 0.33, "target": 0.15, "ttft_ms": 900},
        {**found, "task": "b", "selector": "boundary", "charged": 0.5, "kl": 0.99, "target": 0.15, "half": "report"},
        {**found, "task": "a", "selector": "none", "charged": 0.0, "kl": 1.0, "target": 0.0},
        {**found, "task": "a", "selector": "oracle", "charged": 1.15, "kl": 0.1, "target": 1.15},
    ]
    (tmp_path / "real_selectors.json").write_text(json.dumps({"rows": rows}))
    assert filled("<!--table:choosing-->\nold\n<!--end-->", tmp_path).splitlines()[1:-1] == [
        "| selector | charged | m, a, n = 9 | m, b, n = 9 |",
        "|---|---|---|---|",
        "| full reuse | 0 % | 1.00 [0.28, 0.47], first 0.17; 1.5 s |  |",
        "| `boundary` | 14 to 15 % | 0.37 [0.28, 0.47], first 0.17; 1.5 s | 0.33 [0.28, 0.47], first 0.17; 0.9 s |",
        "| `auto` | 15 % | 0.98 [0.28, 0.47], first 0.17; 1.5 s |  |",
    ]


def test_a_changed_number_would_be_seen():
    place = PLACE.search(README)
    changed = README.replace(place[0], place[0].replace("1", "2", 1))
    assert changed != README
    assert filled(changed, ROOT / "benchmarks" / "results") == README


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", README))
def test_the_link_leads_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("command", re.findall(r"^hf-blend (\S+)", README, re.MULTILINE))
def test_the_command_exists(command):
    assert command in commands()


@pytest.mark.parametrize("target", re.findall(r"`make (\w+)`", README))
def test_the_make_target_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
