# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A live model whose weights, classes or adapters change has another fingerprint; hooks and wrappers are refused."""

import base64
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_hooks
from torch.optim import AdamW
from transformers import DynamicCache

import hf_blend
from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.model import capture
from hf_blend.model.anatomy import per_model
from hf_blend.model.identity import fingerprint
from tests import adapters
from tests.asking import memory

IDS = torch.arange(3, 35)[None]
CHUNKS = [list(range(10, 40)), list(range(50, 90))]


@torch.no_grad()
def kv(model: nn.Module) -> list[torch.Tensor]:
    """What a plain forward of stock transformers computes: the oracle, which knows no fingerprint."""
    cache = DynamicCache()
    logits = model(IDS, past_key_values=cache).logits
    found = [logits]
    for layer in cache.layers:
        found += [layer.keys, layer.values]
    return found


def differs(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.equal(got, expected) for got, expected in zip(one, other, strict=True))


def scaled(function: Callable[..., torch.Tensor], by: float) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * by


def mlp_of(model: nn.Module) -> Any:
    return model.model.layers[1].mlp


def weight_of(model: nn.Module) -> Any:
    return mlp_of(model).down_proj.weight


def trained(model: nn.Module) -> None:
    """One small fused step of an optimizer."""
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def norm_through_data(model: nn.Module) -> None:
    model.model.layers[0].input_layernorm.weight.data.mul_(1.1)


@torch.no_grad()
def value_changed_in_place(model: nn.Module) -> None:
    weight_of(model)[0, 1] += 0.5


def weight_replaced(model: nn.Module) -> None:
    mlp_of(model).down_proj.weight = nn.Parameter(weight_of(model).detach() * 1.1)


def other_frequencies(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.9)


def other_activation(model: nn.Module) -> None:
    mlp_of(model).act_fn = nn.ReLU()


def module_of_other_class(model: nn.Module) -> None:
    layer = model.model.layers[1]
    layer.mlp = Doubled(layer.mlp)


def in_inference_mode(model: nn.Module) -> None:
    """Weights that were built there have no version that torch counts."""
    with torch.inference_mode():
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.clone(), requires_grad=False)
    fingerprint(model)  # as of a model that has served already
    with torch.inference_mode():
        weight_of(model).mul_(1.1)


def swapped(model: nn.Module) -> None:
    one, two = model.model.layers[:2]
    one.mlp, two.mlp = two.mlp, one.mlp


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 2


CHANGES = (  # those of training, steering, serving and research
    trained, norm_through_data, value_changed_in_place, weight_replaced,
    in_inference_mode, swapped, other_frequencies, other_activation, module_of_other_class,
)  # fmt: skip


def method_replaced(patch: pytest.MonkeyPatch, mlp: Any) -> None:
    mlp.forward = scaled(mlp.forward, 1.2)


def plain_attribute(patch: pytest.MonkeyPatch, mlp: Any) -> None:
    mlp.act_fn.forward = nn.functional.relu


def function_of_torch(patch: pytest.MonkeyPatch, mlp: Any) -> None:
    patch.setattr(nn.functional, "silu", scaled(nn.functional.silu, 1.1))


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_what_model_computes(change, tiny_model):
    model = tiny_model("llama")
    before = fingerprint(model)
    states = kv(model)
    assert fingerprint(model) == before, "running it is no change"
    change(model)
    assert differs(kv(model), states), "nothing is tested"
    assert fingerprint(model) != before


@pytest.mark.parametrize("change", [method_replaced, plain_attribute, function_of_torch])  # docs/security.md
def test_canary_of_fresh_look_finds_what_fingerprint_does_not_see(change, model, monkeypatch):
    before = fingerprint(model)
    own = capture.canary_of(model)
    change(monkeypatch, model.model.layers[0].mlp)
    assert fingerprint(model) == before, "more is seen: say so in docs/security.md"
    fingerprint(model, reread=True)
    assert not capture.is_of_model(model, own)


def test_per_model_keeps_result_until_look_finds_another_structure(tiny_model):
    model = tiny_model("llama", num_hidden_layers=1)
    other = tiny_model("llama", num_hidden_layers=1)
    fingerprint(model)
    calls = []

    @per_model
    def count(model):
        calls.append(model)
        return len(calls)

    assert [count(model), count(model), count(other)] == [1, 1, 2]
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    fingerprint(model)
    assert count(model) == 1, "weights are no structure"
    for change in (model.double, lambda: setattr(model.model.layers[0].mlp, "act_fn", nn.ReLU())):
        change()
        fingerprint(model)
        assert count(model) == len(calls)
    assert len(calls) == 4


@pytest.mark.parametrize("where", ["", "model.layers.1.mlp", "model.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_others_are_refused_by_name(kind, where, model):
    before = fingerprint(model)
    handle = getattr(model.get_submodule(where), kind)(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"the forward hook .*test_identity\..*<lambda>.*handle\.remove"):
        fingerprint(model)
    with pytest.raises(UnsupportedModelError, match="forward hook"):
        BlendCache(model, memory())
    handle.remove()
    assert fingerprint(model) == before


@torch.no_grad()
def test_hook_that_no_glance_sees_is_refused_before_logits_leave(model):
    store = memory()
    inputs = {"input_ids": torch.tensor([[1, *CHUNKS[0], 5, 6]]), "logits_to_keep": 1}
    store.add(model, None, CHUNKS)
    expected = model(**inputs, past_key_values=BlendCache(model, store)).logits
    entries = len(store)
    handle = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    cache = BlendCache(model, store)
    with pytest.raises(UnsupportedModelError, match="forward hook"):
        model(**inputs, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert len(store) == entries
    handle.remove()
    assert torch.equal(model(**inputs, past_key_values=cache).logits, expected)


def test_hooks_on_every_module_are_refused(model):
    before = fingerprint(model)
    for register in (torch_hooks.register_module_forward_hook, torch_hooks.register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        try:
            with pytest.raises(UnsupportedModelError, match="every module has the forward hook"):
                fingerprint(model)
        finally:
            handle.remove()
        assert fingerprint(model) == before


def test_hooks_of_observers_and_libraries_are_accepted(model):
    before = fingerprint(model)
    seen = []
    handle = model.model.layers[0].register_forward_hook(hf_blend.observer(lambda *_: seen.append(1)))
    assert fingerprint(model) == before
    handle.remove()
    model(IDS, output_hidden_states=True, output_attentions=False)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules()), "nothing is tested"
    assert fingerprint(model) == before


def refuses(given: nn.Module, text: str) -> None:
    store = memory()
    with pytest.raises(UnsupportedModelError, match=text):
        BlendCache(given, store)
    with pytest.raises(UnsupportedModelError, match=text):
        store.add(given, None, CHUNKS)


@pytest.mark.parametrize("compile_", ["wrapper", "in place", "forward", "a layer"])
def test_compiled_models_are_refused_by_name(compile_, model):
    def compiled() -> nn.Module:
        if compile_ == "wrapper":
            return torch.compile(model)
        if compile_ == "in place":
            model.compile()
        elif compile_ == "forward":
            model.forward = torch.compile(model.forward)
        else:
            model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
        return model

    fingerprint(model)
    given = compiled()
    refuses(given, "compiled")


def test_wrappers_and_headless_models_are_refused(model):
    class Engine(nn.Module):
        module = model

    for given, text in (
        (nn.DataParallel(model), r"DataParallel is a wrapper .* Pass the model inside it \(model\.module\)"),
        (Engine(), r"Engine is a wrapper"),
        (model.model, "LlamaModel has no language modelling head.*Pass the whole causal language model"),
        (nn.Linear(2, 2), "Linear has no config"),
    ):
        refuses(given, text)


def generate(model: nn.Module, store: ChunkStore) -> BlendCache:
    cache = BlendCache(model, store)
    inputs = cache.inputs(None, prefix=[5, 6], chunks=CHUNKS, question=[7, 8, 9])
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    return cache


def test_add_stores_nothing_of_model_that_changes_meanwhile(model, monkeypatch):
    captured = capture.capture_chunks

    def train(*arguments: Any) -> Any:
        chunks = list(captured(*arguments))
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        return iter(chunks)

    monkeypatch.setattr(capture, "capture_chunks", train)
    store = memory()
    with pytest.raises(UnsupportedModelError, match="changed while a chunk was computed"):
        store.add(model, None, CHUNKS)
    assert len(store) == 0


def chunks_of(store: ChunkStore, model: nn.Module) -> list[torch.Tensor]:
    keys = store.add(model, None, CHUNKS)
    return [states for key in keys for layer in store.get(key).layers for states in layer]


def test_chunks_of_model_in_training_are_those_of_evaluation(tiny_model):
    model = tiny_model("llama", num_hidden_layers=2, attention_dropout=0.5)
    expected = chunks_of(memory(), model)
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    assert not differs(chunks_of(memory(), model), expected)
    assert [module.training for module in model.modules()] == modes
    model.model.layers[1].mlp.down_proj.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        chunks_of(memory(), model)
    assert [module.training for module in model.modules()] == modes


def test_autocast_changes_no_chunk_and_is_refused_in_requests(model):
    store = memory()
    expected = chunks_of(memory(), model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not differs(chunks_of(store, model), expected)
        BlendCache(model, store)  # the self-test is not misled
        with pytest.raises(ConfigError, match=r"autocast is on \(bfloat16 on cpu\).*Leave the autocast block"):
            generate(model, store)
        assert torch.is_autocast_enabled("cpu")
    assert len(store) == len(CHUNKS), "the prefix was neither computed nor stored"


@pytest.mark.parametrize(("factor", "computed"), [(1 + 1e-4, 0), (1.1, 1)])
def test_chunk_with_another_canary_is_miss(factor, computed, model):
    store = memory()
    [key] = store.add(model, None, CHUNKS[:1])
    chunk = store.get(key)
    numbers = capture._decoded(chunk.canary) * factor
    text = base64.b64encode(numbers.numpy().tobytes()).decode()
    store.delete(key)
    store.put(dataclasses.replace(chunk, canary=text))
    cache = BlendCache(model, store)
    inputs = cache.inputs(None, prefix=[1], chunks=CHUNKS[:1], question=[7, 8])
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.report.computed_chunks == computed + 1, "what the prompt begins with was not stored"
    assert store.stats()["misses"].get("canary", 0) == computed
    assert store.get(key).canary == capture.canary_of(model) or not computed


@pytest.mark.parametrize("text", ["!", "AAAA", "x" * 400])
def test_canary_that_cannot_be_read_is_of_no_model(text, model):
    fingerprint(model)
    assert not capture.is_of_model(model, text)


def test_canary_is_same_with_another_attention(model):
    before = fingerprint(model)
    own = capture.canary_of(model)
    model.set_attn_implementation("eager")
    assert fingerprint(model, reread=True) == before
    assert capture.is_of_model(model, own)


def test_adapters_count_by_weights_scale_and_activity():
    model = adapters.adapted()
    before = fingerprint(model)
    seen = {before}
    for change in (adapters.switched, adapters.off):
        with change(model):
            seen.add(fingerprint(model))
        assert fingerprint(model) == before
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.scale_layer(2.0)
    seen.add(fingerprint(model))
    layer.unscale_layer(2.0)
    assert fingerprint(model) == before
    layer.lora_A["formal"].weight.data.mul_(1.5)
    seen.add(fingerprint(model))
    with adapters.merged(model):
        seen.add(fingerprint(model))
    assert len(seen) == 6


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_adapters_that_are_chosen_per_request_are_refused(call):
    model = adapters.adapted()
    store = memory()
    cache = BlendCache(model, store)
    inputs = cache.inputs(None, chunks=CHUNKS, question=[7, 8, 9])
    run = model if call == "forward" else partial(model.generate, max_new_tokens=2, do_sample=False)
    with pytest.raises(UnsupportedModelError, match="for this request alone"):
        run(**inputs, past_key_values=cache, adapter_names=["casual"])
    assert len(store) == 0
