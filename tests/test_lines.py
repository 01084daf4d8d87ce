# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The project does not grow unseen: lines of Python are counted by room. Lower a number where lines went."""

import lines

MOST = {"hf_blend": 33_500, "wheel": 41_850, "tests": 34_200}


def test_lines_of_library_package_and_tests_do_not_grow():
    found = lines.totals()
    grown = {name: (count, MOST[name]) for name, count in found.items() if count > MOST[name]}
    assert not grown, f"(found, most): {grown}; `python benchmarks/lines.py` shows the rooms"


def test_the_table_has_every_room_and_its_sums():
    found, shown = lines.by_room(), lines.table()
    assert {*lines.CORE} <= {*found}
    assert all(f"{name:14}{count:>8,}" in shown for name, count in found.items())
    assert sum(count for name, count in found.items() if name not in lines.BESIDE) == lines.totals()["hf_blend"]
