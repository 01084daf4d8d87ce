# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The programs in benchmarks/ run, in the small, and what is committed of them has the figures that they promise."""

import json
from pathlib import Path

import bench
import gpu
import pytest
import torch

from tests.conftest import slow_but

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.slow
def test_gpu_benchmark_runs_on_cpu(tmp_path):
    output = tmp_path / "gpu.json"
    small = ["--tokens", "200", "--chunk-tokens", "64", "--question-tokens", "8", "--rounds", "1"]
    gpu.main(["--device", "cpu", "--shape", "tiny", *small, "--output", str(output)])
    found = json.loads(output.read_text("utf-8"))
    assert [row["ratio"] for row in found["rows"]] == [0.15, 0.05]
    for row in found["rows"]:
        assert row["tokens"] == 137
        assert row["ttft_ratio"] == pytest.approx(row["ttft_ms"] / row["full_ttft_ms"])
        assert row["bound_share"] == pytest.approx(1 / row["ttft_ratio"] / row["flop_bound"])
        assert 0 < row["charged_budget"] < 1 < row["flop_bound"]
    assert found["machine"]["torch"] == torch.__version__


SMALL = {
    "break-even": "--shape tiny --tokens 32 --rounds 1",
    "decode": "--shape tiny --contexts 64 --tokens 2 --rounds 1",
    "hybrids": "--shapes tiny-hybrid --chunks 2 --chunk-tokens 24 --rounds 1",
    "overhead": "--shape tiny --tokens 64 --chunks 2 --rounds 1",
    "offload": "--shape tiny --contexts 64 --tokens 2 --rounds 1",
    "store": "--entries 2 --tokens 16 --small-entries 20 --rounds 1",
    "sparse-decode": "--shape tiny --contexts 256 --shares 0.5 --tokens 2 --rounds 1",
}


@pytest.mark.parametrize("name", slow_but("decode", among=SMALL))
def test_measurement_makes_what_its_file_holds(name):
    kept = BENCHMARKS / "results" / f"{name.replace('-', '_')}.json"
    found = bench.run([name, *SMALL[name].split()])
    rows = found.get("rows", [found])
    assert rows
    if kept.exists():
        held = json.loads(kept.read_text("utf-8"))
        expected, *_ = held.get("rows", [held])
        assert rows[0].keys() >= expected.keys()
