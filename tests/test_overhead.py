# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a prefill asks of the host is counted, so that it cannot grow unseen: a GPU waits for every launch."""

import pytest
import torch

from hf_blend.evaluation.bench.overhead import KernelCount, OverheadPlan, measure_overhead

WAITS = {"kv-deviation": 3, "boundary": 3}  # the ids, what the model is, whether layer 0 fits what is stored
KERNELS = 1.15  # of a stock prefill


@pytest.mark.parametrize("selector", WAITS)
def test_a_layer_launches_hardly_more_kernels_than_a_stock_one_however_many_chunks_there_are(selector):
    plan = OverheadPlan(tokens=160, short_tokens=32, chunks=(2, 16), settings=((selector, 0.15),), rounds=1)
    few, many = measure_overhead(plan)["rows"]
    assert many["kernels_per_layer"] <= KERNELS * many["stock_kernels_per_layer"]
    assert many["kernels_per_layer"] == pytest.approx(few["kernels_per_layer"], rel=0.03)
    assert few["syncs"] == many["syncs"] <= many["stock_syncs"] + WAITS[selector]


def test_the_count_sees_kernels_and_waits_but_no_views():
    states = torch.ones(4, 6)
    with KernelCount().counting() as counted:
        assert int((states.view(6, 4)[2:].transpose(0, 1) + 1).sum()) == 32
        states.tolist()
    assert counted.kernels == {"aten::add": 1, "aten::sum": 1}
    assert sum(counted.syncs.values()) == 2
