# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes models from saved checkpoints, on the CPU: the ladder holds, and their KV is nobody else's."""

import copy
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import quantised as measured
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from hf_blend import BlendCache, UnsupportedModelError
from hf_blend.model import checks
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.identity import fingerprint
from hf_blend.model_names import PACKAGED, converted_models, load_model
from hf_blend.verify.runner import verify
from tests.asking import PIECES, asked, memory
from tests.chat_templates import DOCUMENTS, QUESTION
from tests.conftest import slow_but

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")

ROOT = Path(__file__).resolve().parents[1]
KINDS: dict[str, dict[str, Any]] = {
    "8bit": {"load_in_8bit": True},
    "8bit-exact": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "4bit": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32},
    "4bit-nested": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": True},
    "4bit-bfloat16": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16},
}
RUNGS = ("ratio_1", "fused_ratio", "untouched")  # all of them in the slow suite
OUTLIER_FEATURES = 3  # above the threshold of 6 in some rows and below it in others
OUTLIER_SCALE = 40.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of one model, quantised in each way, whose first norm makes a few features large."""
    from transformers import BitsAndBytesConfig

    root = tmp_path_factory.mktemp("quantised")
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[:OUTLIER_FEATURES] *= OUTLIER_SCALE
    model.save_pretrained(root / "plain")
    for kind, settings in KINDS.items():
        dtype = torch.bfloat16 if kind == "4bit-bfloat16" else torch.float32
        how = {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": "cpu"}, "dtype": dtype}
        AutoModelForCausalLM.from_pretrained(root / "plain", **how).save_pretrained(root / kind)
    return root


@pytest.fixture(scope="module")
def climbed(folder):
    """Gives the verdict on the checkpoint of a kind; it is climbed once."""
    return cache(lambda kind: verify(str(folder / kind), dtypes=["float32"], attention=["sdpa"], checks=RUNGS))


@pytest.fixture
def rounding_cpu(monkeypatch):
    """A CPU with AVX512-BF16, as bitsandbytes sees it: 4-bit weights are repacked, and products are in bfloat16."""
    from bitsandbytes import functional
    from bitsandbytes.nn import modules

    if not hasattr(functional, "_convert_weight_packed_for_cpu"):
        pytest.skip("this bitsandbytes repacks nothing")

    def kernel(inputs: torch.Tensor, packed: torch.Tensor, out: Any = None, state: Any = None, **_: Any) -> Any:
        plain = copy.copy(state)
        plain.original_nested = False
        codes, _ = functional._convert_weight_packed_for_cpu_inverse(packed.data, plain)
        places = torch.stack([codes.reshape(-1) >> 4, codes.reshape(-1) & 15], dim=1).reshape(state.shape)
        scales = state.absmax.T.repeat_interleave(state.blocksize, dim=1)
        weight = (state.code[places.long()] * scales).to(torch.bfloat16)
        return inputs.to(torch.bfloat16) @ weight.T

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(functional, "gemv_4bit", kernel)


def is_packed(model: torch.nn.Module) -> bool:
    weight = model.model.layers[0].self_attn.q_proj.weight
    return getattr(weight.quant_state, "packing_format_for_cpu", False)


@pytest.mark.parametrize("kind", slow_but("4bit-nested", among=["4bit", "4bit-nested"]))
def test_cpu_that_repacks_and_rounds_is_simulated_and_calibrated_by_its_own_noise(kind, folder, rounding_cpu):
    model = load_model(str(folder / kind))
    plain = load_model(str(folder / kind))
    for module in plain.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        exact = plain(ids).logits
        rounded = model(ids).logits
    assert is_packed(model)
    assert not is_packed(plain)
    assert 1e-4 < (exact - rounded).norm() / exact.norm() < 0.1, "the same weights, in another precision"
    assert len(rotary_styles(model)) == model.config.num_hidden_layers
    assert len(set(rotary_styles(model))) == 1


@pytest.mark.parametrize(
    "kind", slow_but("4bit-bfloat16", "8bit", among=["4bit", "4bit-nested", "4bit-bfloat16", "8bit"])
)
def test_fingerprint_of_weights_that_their_first_forward_repacks_stays(kind, folder, rounding_cpu):
    before = fingerprint(load_model(str(folder / kind)))
    model = load_model(str(folder / kind))
    late = load_model(str(folder / kind))
    assert fingerprint(model) == before
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
        late(torch.tensor([[5, 6, 7]]))
    assert is_packed(model) == kind.startswith("4bit") if kind != "8bit" else True
    assert fingerprint(model) == before
    assert fingerprint(late) == before, "also where nobody looked before the first forward"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "8bit", "8bit-exact", "4bit"])
def test_quantised_model_blends_and_its_report_says_what_its_noise_is(kind, dtype, folder):
    model = AutoModelForCausalLM.from_pretrained(str(folder / kind), dtype=dtype, device_map={"": "cpu"})
    cache, _ = asked(model, PIECES, recompute_ratio=0.2)
    assert cache.report.reusable_tokens
    assert not cache.report.refused_chunks
    noise = cache.report.quantisation_noise
    assert ("quantisation alone" in str(cache.report)) == (noise > 0)
    if kind == "8bit":
        assert 1e-3 < noise < 0.2
    if kind == "plain":
        assert noise == 0


def test_quantised_model_beyond_its_noise_is_refused_as_such(folder, monkeypatch):
    model = load_model(str(folder / "8bit"))
    monkeypatch.setattr(checks, "MOST_ALLOWED", 1e-9)
    monkeypatch.setattr(checks, "LOGITS", (0.0, 0.0, 0.0))
    with pytest.raises(UnsupportedModelError, match="allowed: its quantisation makes plain prefills"):
        BlendCache(model, memory())


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_quantised_model_whose_tokens_see_those_behind_them_is_refused(kind, folder):
    model = load_model(str(folder / kind))
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match=r"see those behind them.*quantisation explains"):
        BlendCache(model, memory())


def test_checks_hold_within_measured_floor(climbed):
    """All checks, on every kind, are slow."""
    verdict = climbed("4bit")
    assert verdict.supported, verdict.reason
    assert len(verdict.checks) == len(RUNGS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["4bit", "4bit-bfloat16"])
def test_ladder_holds_in_4_bit_with_avx512_bf16(kind, folder, rounding_cpu):
    verdict = verify(str(folder / kind), dtypes=["float32"], attention=["sdpa"], checks=RUNGS)
    assert verdict.supported, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_rung_holds(kind, folder):
    verdict = verify(str(folder / kind), dtypes=["float32"])
    assert verdict.supported, verdict.reason


@pytest.mark.slow
def test_without_threshold_8_bit_is_exact_and_with_one_its_floor_is_measured(climbed):
    exact = climbed("8bit-exact")
    found = climbed("8bit")
    errors = [rung.max_abs_error for rung in exact.checks if rung.name == "ratio_1"]
    assert len(errors) == 1
    assert errors[0] < 1e-5
    assert found.floors[0]["logits"] > 5 * exact.floors[0]["logits"], "outliers depend on the rows beside them"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", measured.KINDS)
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_quantised_model_is_blended_within_its_own_noise(name, kind, dtype):
    if name not in PACKAGED and name not in converted_models():
        pytest.skip("python benchmarks/parted_models.py converts it")
    model, tokenizer = measured.load(name, kind, dtype)
    found = measured.measure(model, tokenizer, {"chunks": DOCUMENTS, "question": QUESTION}, len(DOCUMENTS))
    noise = 0.3 if kind.startswith("8") else 0.03  # the largest of six prompts of the table is half of it
    assert max(found["two blocks"], found["all computed"]) < noise
    assert max(found.values()) < 1.0


def test_page_has_table_of_what_was_measured():
    rows = json.loads((ROOT / "benchmarks/results/quantised.json").read_text("utf-8"))
    assert measured.table(rows) in (ROOT / "docs/models.md").read_text("utf-8")


def test_fingerprint_of_each_way_to_quantise_is_its_own(folder):
    names = {kind: fingerprint(load_model(str(folder / kind))) for kind in ("plain", *KINDS)}
    assert len(set(names.values())) == len(names)
    assert fingerprint(load_model(str(folder / "8bit"))) == names["8bit"], "and the same one at every load"


def test_chunks_of_another_precision_are_not_used(folder):
    store = memory()
    for kind, computed in (("plain", 3), ("4bit", 3), ("8bit", 3), ("8bit", 0)):
        cache, _ = asked(load_model(str(folder / kind)), PIECES, store=store)
        assert cache.report.computed_chunks == computed, "prefix and chunks, unless this very model has stored them"
