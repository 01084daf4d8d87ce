# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Two models with one fingerprint have the same KV: whatever could change KV changes the fingerprint."""

import copy
import random

import pytest
import torch
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from hf_blend.errors import UnsupportedModelError
from hf_blend.model.identity import IGNORED_CONFIG_FIELDS, checksum, config_part, fingerprint

CONFIGS = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig]


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


def test_fingerprint_is_that_of_model_built_copied_loaded_or_in_inference_mode(tiny_model, model, tmp_path):
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        other = tiny_model("llama", num_hidden_layers=2)
        assert fingerprint(other) == fingerprint(model)
    loaded = type(model).from_pretrained(tmp_path)
    for one in (other, tiny_model("llama", num_hidden_layers=2), copy.deepcopy(model), loaded):
        assert fingerprint(one) == fingerprint(model)
    assert len(fingerprint(model)) == 64
    assert int(fingerprint(model), 16)


KNOWN = "aaeae30b2aed3c32c1a6ef8f832a9a3cae85a486bc65a5cdc274b3b39d4c1a2b"


def test_fingerprint_never_changes():
    class Config:
        def to_dict(self):
            return {"theta": 1e4, "names": {"a", "b", "c"}, 1: None, "dtype": "ignored"}

    model = nn.Linear(3, 5)
    model.config = Config()
    with torch.no_grad():
        model.weight.copy_(torch.arange(15.0).view(5, 3))
        model.bias.fill_(0.1)
    assert fingerprint(model) == KNOWN


def test_fingerprint_changes_with_any_single_weight(model):
    seen = {fingerprint(model)}
    draw = random.Random(0)
    for _, parameter in model.named_parameters():
        at = draw.randrange(parameter.numel())
        with torch.no_grad():
            parameter.view(-1)[at] = torch.nextafter(parameter.view(-1)[at], torch.tensor(9e9))
        seen.add(fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))


def test_fingerprint_changes_with_dtype_config_and_class_of_live_model(model):
    """What else changes on a live model is in `test_identity`."""
    seen = {fingerprint(model)}
    for name, value in (("rms_norm_eps", 0.5), ("quantization_config", {"quant_method": "bitsandbytes"})):
        setattr(model.config, name, value)
        seen.add(fingerprint(model))
    seen.add(fingerprint(model.to(torch.bfloat16)))
    model.__class__ = type("OtherModel", (type(model),), {})
    seen.add(fingerprint(model))
    assert len(seen) == 5


def test_fingerprint_of_weight_that_changed_back_is_old_one(model):
    weight = model.model.layers[0].self_attn.k_proj.weight
    before = fingerprint(model)
    with torch.no_grad():
        weight.neg_()
        assert fingerprint(model) != before
        weight.neg_()
    assert fingerprint(model) == before


def mutations(value):
    """Another value of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return [value]


@pytest.mark.parametrize("config_class", CONFIGS, ids=lambda one: one.__name__)
def test_config_part_holds_every_field_that_is_not_on_reviewed_list(config_class):
    fields = config_class().to_dict()
    before = config_part(fields)
    unseen = {name for name, value in fields.items() if config_part({**fields, name: mutations(value)}) == before}
    assert unseen <= IGNORED_CONFIG_FIELDS
    hidden = set(vars(config_class())) - set(fields)
    assert hidden <= IGNORED_CONFIG_FIELDS, "fields that to_dict leaves out: does KV depend on them?"


def test_fingerprint_reads_weights_that_accelerate_put_elsewhere(model, tmp_path):
    from accelerate import cpu_offload, disk_offload

    before = fingerprint(model)
    offloaded = copy.deepcopy(model)
    disk_offload(offloaded, tmp_path, execution_device=torch.device("cpu"))
    assert offloaded.model.layers[0].mlp.up_proj.weight.is_meta
    assert fingerprint(offloaded) == before
    on_cpu = copy.deepcopy(model)
    cpu_offload(on_cpu, torch.device("cpu"))
    assert fingerprint(on_cpu) == before


def test_fingerprint_refuses_model_without_weights_by_name(model):
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight is on the meta device"):
        fingerprint(model.to("meta"))


class Wrapped(torch.Tensor):
    """A quantised tensor as torchao makes them: plain tensors inside."""

    @staticmethod
    def __new__(cls, data, scale):
        wrapped = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)
        wrapped.data_part = data
        wrapped.scale = scale
        return wrapped

    def __tensor_flatten__(self):
        return ["data_part", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_fingerprint_knows_wrapped_weights_by_what_is_inside(model):
    def known(*inside: torch.Tensor) -> str:
        model.extra = nn.Module()
        model.extra._buffers["weight"] = Wrapped(*inside)
        return fingerprint(model)

    inside = torch.arange(6, dtype=torch.int8), torch.tensor([0.5])
    before = known(*inside)
    assert known(*(tensor.clone() for tensor in inside)) == before
    assert known(inside[0], torch.tensor([0.6])) != before
    assert known(inside[0] + 1, inside[1]) != before


def zeros():
    layer = nn.Linear(4, 4)
    for weight in layer.parameters():
        nn.init.zeros_(weight)
    return layer


def quantised(scale=1.0, nested=0.0):
    """A module that keeps its scales beside its weight, as bitsandbytes does."""
    layer = zeros()
    inner = type("Inner", (), {"absmax": torch.full((2,), nested), "code": torch.ones(4), "offset": None})()
    outer = type(
        "Outer", (), {"absmax": torch.full((2,), scale), "code": torch.ones(4), "offset": 1, "state2": inner}
    )()
    layer.weight.quant_state = outer
    return layer


def test_fingerprint_changes_with_scales_of_quantised_weights(model):
    seen = set()
    for layer in (quantised(), quantised(scale=2.0), quantised(nested=1.0)):
        model.extra = layer
        seen.add(fingerprint(model))
    for scale in (1.0, 2.0):
        layer = zeros()
        layer.weight.SCB = None
        layer.state = type("MatmulLtState", (), {"SCB": torch.tensor([scale])})()
        model.extra = layer
        seen.add(fingerprint(model))
        layer.weight.SCB = layer.state.SCB
        layer.state.SCB = None
        assert fingerprint(model) in seen
    assert len(seen) == 5


def test_checksum_changes_with_every_value_and_its_place_and_sign():
    draw = random.Random(0)
    for size in (0, 1, 7, 8, 9, 4096, 4097):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.bool):
            values = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
            changed = {at: values.clone() for at in {0, size // 2, size - 1} & set(range(size))}
            for at, one in changed.items():
                one[at] = 1 - one[at].float()
            assert len({checksum(values), *map(checksum, changed.values())}) == 1 + len(changed)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sums = {checksum(values)}
    for _ in range(300):
        one, other = draw.sample(range(1000), 2)
        exchanged = values.clone()
        negated = values.clone()
        exchanged[[one, other]] = values[[other, one]]
        negated[[one, other]] *= -1
        sums |= {checksum(exchanged), checksum(negated)}
    assert len(sums) == 601
