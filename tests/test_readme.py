# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the README says is so: its numbers come from the committed results, its links and commands exist."""

import re
import subprocess
from pathlib import Path

import pytest

from hf_blend.cli.main import commands
from hf_blend.evaluation.readme import PLACE, filled

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_the_tables_are_those_of_the_committed_results():
    assert set(PLACE.findall(README)) == {"reference", "ttft", "families", "context_shift", "self_extend"}
    assert filled(README, ROOT / "benchmarks" / "results") == README


def test_a_changed_number_would_be_seen():
    place = PLACE.search(README)
    changed = README.replace(place[0], place[0].replace("0.", "1.", 1))
    assert changed != README
    assert filled(changed, ROOT / "benchmarks" / "results") == README


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_the_link_leads_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("command", re.findall(r"^hf-blend (\S+)", README, re.MULTILINE))
def test_the_command_exists(command):
    assert command in commands()


@pytest.mark.parametrize("target", re.findall(r"^make (\S+)", README, re.MULTILINE))
def test_the_make_target_exists(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
