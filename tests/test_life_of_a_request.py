# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""docs/life_of_a_request.md names what a prefill really calls, in its order."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^\* `([\w/]+\.py)` (`[\w.]+`(?:, `[\w.]+`)*)", re.MULTILINE)


def traced() -> list[tuple[str, str]]:
    """The functions of one prefill in the order of their first call."""
    spec = importlib.util.spec_from_file_location("calls", ROOT / "benchmarks" / "calls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.count_calls().counts)


def told() -> list[tuple[str, str]]:
    """The functions that the page names."""
    page = (ROOT / "docs" / "life_of_a_request.md").read_text("utf-8")
    assert page.count("\n## ") == 8
    return [(file, name) for file, names in STEP.findall(page) for name in re.findall(r"`([\w.]+)`", names)]


def test_the_page_names_what_is_called_in_the_order_in_which_it_is_called():
    called, named = traced(), told()
    assert not [entry for entry in named if entry not in called]
    places = [called.index(entry) for entry in named]
    assert places == sorted(places), [named[n] for n in range(1, len(named)) if places[n] < places[n - 1]]
