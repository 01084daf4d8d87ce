# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The Space in app/: its front matter is whole, its requirements are the tested ones, and it starts as laid out."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import SpaceCard
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", "utf-8")
CARD = SpaceCard((ROOT / "app" / "README.md").read_text("utf-8")).data.to_dict()
KEYS = {
    *("title", "emoji", "colorFrom", "colorTo", "sdk", "sdk_version", "python_version", "app_file", "pinned"),
    *("license", "short_description", "suggested_hardware", "tags", "models", "datasets"),
    "preload_from_hub",
}
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def wanted(text):
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in map(Requirement, lines)}


PINS = wanted((ROOT / "constraints.txt").read_text("utf-8"))
BROUGHT = wanted((ROOT / "app" / "requirements.txt").read_text("utf-8"))


def test_the_front_matter_has_known_keys_and_values():
    assert set(CARD) <= KEYS, "a misspelt key would be ignored"
    assert KEYS - set(CARD) <= {"models", "datasets"}
    assert {CARD["colorFrom"], CARD["colorTo"]} <= COLOURS
    assert CARD["sdk"] == "gradio"
    assert (ROOT / "app" / CARD["app_file"]).is_file()
    assert len(CARD["short_description"]) <= 60


def test_the_space_brings_all_that_the_library_needs_in_the_tested_versions():
    assert f"=={CARD['sdk_version']}" == str(PINS["gradio"].specifier)
    assert {name: str(one) for name, one in BROUGHT.items()} == {name: str(PINS[name]) for name in BROUGHT}
    extras = (SETUP["options.extras_require"][name] for name in ("demo", "rag"))
    assert set(wanted("\n".join([SETUP["options"]["install_requires"], *extras]))) == set(BROUGHT)


@pytest.mark.slow
def test_the_layout_starts_without_an_installation(tmp_path):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install hf-blend[demo]")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (line,) = re.findall(r"^\tcp -r app/\. (.+) build/space/$", makefile, re.MULTILINE)
    for name in [*line.split(), *(path.name for path in (ROOT / "app").iterdir())]:
        source = ROOT / name if (ROOT / name).exists() else ROOT / "app" / name
        (tmp_path / name).symlink_to(source)
    code = (
        "import app, hf_blend\nfrom hf_blend.evaluation.demo.page import build\n"
        "assert hf_blend.__file__.startswith(app.__file__.removesuffix('app.py')), hf_blend.__file__\n"
        "build(app.demo)\nprint(app.demo.shelf.takes_folders)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"
