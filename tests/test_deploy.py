# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/: what they call exists, and programs that read them accept them where they are installed."""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"


def test_the_image_is_made_of_files_and_extras_that_exist_and_holds_every_package():
    text = (DEPLOY / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    folders = {entry.split(" = ")[1] for entry in setup["options"]["package_dir"].split("\n") if entry}
    assert folders <= {*copied}
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert {*extras.split(",")} <= {*setup["options.extras_require"]}
    assert [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
