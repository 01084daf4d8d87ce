# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose layers accelerate keeps on the CPU or on disk: blending is exact, and accelerate's hooks stay."""

import copy
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from tiny_models import tiny_model

from hf_blend import UnsupportedModelError
from hf_blend.model import identity
from hf_blend.model.anatomy import decoder_layers, input_device
from hf_blend.model.attention import LocalLines, MadeLines
from hf_blend.verify.model_under_test import ModelUnderTest
from hf_blend.verify.runner import measure
from tests.asking import PIECES, asked, generated, hooks, memory, prepared
from tests.conftest import slow_but

CPU = torch.device("cpu")
EXACT = ("ratio_1", "fused_ratio")
RUNGS = (*EXACT, "moved_chunk", "untouched")
TELLING = (*EXACT, "untouched")


def device_map(model: Any, near: str) -> dict[str, str]:
    """Every other layer on disk, all else as `near` says."""
    base = model.base_model_prefix
    places = {name: near for name, _ in model.named_children() if name != base}
    places |= {f"{base}.{name}": near for name, _ in model.base_model.named_children() if name != "layers"}
    count = len(decoder_layers(model))
    return places | {f"{base}.layers.{index}": "disk" if index % 2 else near for index in range(count)}


def offloaded(model: Any, how: str, folder: Any) -> Any:
    """The model, dispatched in place."""
    if how == "cpu":
        return cpu_offload(model, CPU)
    if how == "disk":
        return disk_offload(model, str(folder), execution_device=CPU)
    places = device_map(model, "cpu")
    return dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


in_every_way = pytest.mark.parametrize("how", ["cpu", "disk", "map"])
from_disk = pytest.mark.parametrize("how", slow_but("disk", among=["cpu", "disk", "map"]))


def dispatched(name: str, how: str, folder: Any) -> Any:
    model = offloaded(tiny_model(name), how, folder)
    model.set_attn_implementation("sdpa")
    assert all(weight.is_meta for weight in decoder_layers(model)[1].parameters())
    return model


@pytest.mark.parametrize(
    ("name", "where", "checks"),
    slow_but(
        ("llama", "map", TELLING),
        among=[
            ("llama", "map", TELLING),
            ("llama", "cpu", RUNGS),
            ("gemma3_text", "disk", RUNGS),
            ("gpt_neox", "map", RUNGS),
        ],
    ),
)
def test_checks_hold_wherever_layers_are(name, where, checks, tmp_path):
    subject = ModelUnderTest(dispatched(name, where, tmp_path))
    found = [measure(check, subject, "float32", "sdpa") for check in checks]
    assert [check for check in found if not check.passed] == []
    assert max(check.max_abs_error for check in found if check.name in EXACT) <= 1e-5


@in_every_way
def test_fingerprint_chunks_and_text_of_dispatched_model_are_same(how, tmp_path):
    whole = tiny_model("llama")
    store = memory()
    model = offloaded(copy.deepcopy(whole), how, tmp_path)
    assert identity.fingerprint(model) == identity.fingerprint(whole)
    cache, expected = asked(whole, PIECES, store=store)
    assert cache.report.computed_chunks == 3
    cache, got = asked(model, PIECES, store=store)
    assert cache.report.loaded_chunks == 3
    assert cache.report.computed_chunks == 0
    assert torch.equal(got, expected)
    check_exact(model, whole)


def check_exact(model: Any, whole: Any) -> None:
    cache, inputs = prepared(model, PIECES, recompute_ratio=1.0)
    assert torch.equal(generated(model, inputs, cache), generated(whole, inputs))
    assert cache.report.reusable_tokens > 0


@from_disk
def test_hooks_of_accelerate_stay_and_work_after_exception_too(how, tmp_path, monkeypatch):
    model = dispatched("llama", how, tmp_path)
    _, expected = asked(model, PIECES)

    def placed() -> dict[str, Any]:
        modules = ((name, one) for name, one in model.named_modules() if hasattr(one, "_hf_hook"))
        return {name: (one._hf_hook, one.forward) for name, one in modules}

    before = placed()
    assert before
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[2].mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asked(model, PIECES)
    assert hooks(model) == 0
    assert placed() == before
    assert decoder_layers(model)[1].mlp.up_proj.weight.is_meta, "and the weights are offloaded again"
    assert torch.equal(asked(model, PIECES)[1], expected)


def test_input_device_refuses_model_without_weights_with_remedy():
    model = tiny_model("llama").to("meta")
    with pytest.raises(UnsupportedModelError, match=r"embeddings of LlamaForCausalLM.*meta.*Load the weights"):
        input_device(model)


def test_row_lines_go_where_accelerate_brings_them():
    from accelerate.utils import send_to_device

    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    for lines in (
        LocalLines(torch.tensor([[2, 5, 8]]), 9, numbers=lambda: [2, 5, 8]),
        MadeLines(mask, torch.tensor([[2, 5, 8]])),
    ):
        assert lines.to(torch.device("cpu")) is lines
        moved = send_to_device({"rows": lines}, torch.device("meta"))["rows"]
        assert type(moved) is type(lines)
        assert moved.shape == lines.shape
        assert moved.is_causal == lines.is_causal
        assert moved.device.type == "meta"
