# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A bench times the model that is named, and counts what a prefill asks of the host: a GPU waits for every launch."""

import re

import pytest
import torch
from benches.overhead import OverheadPlan, measure_overhead

from hf_blend.errors import ConfigError
from hf_blend.evaluation.bench import shapes
from hf_blend.evaluation.bench.shapes import timed_model
from tests.conftest import slow_but

SMALL = "--chunks 2 --chunk-tokens 24 --question-tokens 4 --ratio 0.2 --rounds 1"


def test_bench_times_model_that_is_named(model_folder, run, monkeypatch):
    monkeypatch.setattr(shapes, "random_model", None)  # weights are never made up
    code, out, err = run("bench", "ttft", "--model", model_folder, *SMALL.split(), "--json")
    assert code == 0, err
    assert {*re.findall(r'"shape": "(.*)"', out)} == {f"model:{model_folder}"}


def test_name_says_whether_it_is_shape_and_dtype_is_known(model_folder):
    own = timed_model(f"model:{model_folder}", "bfloat16", "cpu")
    assert own.dtype == torch.bfloat16
    assert timed_model("tiny", "auto", "cpu").dtype == torch.float32
    for name, said in (("tinny", "Did you mean 'tiny'"), ("model:./nowhere", "there is no folder './nowhere'")):
        with pytest.raises(ConfigError, match=said):
            timed_model(name, "float32", "cpu")
    with pytest.raises(ConfigError, match="no dtype named 'float23'"):
        timed_model("tiny", "float23", "cpu")


WAITS = dict.fromkeys(("kv-deviation", "boundary", "expected-error", "stored-importance"), 3)  # ids, author, layer 0
KERNELS = {"expected-error": 2.4}  # of a stock prefill; its probe is a second forward


@pytest.mark.parametrize("selector", slow_but("kv-deviation", "stored-importance", among=WAITS))
def test_layer_launches_hardly_more_kernels_than_stock_one_however_many_chunks_there_are(selector):
    plan = OverheadPlan(tokens=160, short_tokens=32, chunks=(2, 16), settings=((selector, 0.15),), rounds=1)
    few, many = measure_overhead(plan)["rows"]
    assert many["kernels_per_layer"] <= KERNELS.get(selector, 1.15) * many["stock_kernels_per_layer"]
    assert many["kernels_per_layer"] == pytest.approx(few["kernels_per_layer"], rel=0.03)
    assert few["syncs"] == many["syncs"] <= many["stock_syncs"] + WAITS[selector]
