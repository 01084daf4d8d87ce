# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever changes what a forward computes gives another fingerprint, or a refusal that names it."""

import base64
import contextlib
import copy
import dataclasses
import enum
import functools
import gc
import mmap
import operator
import random
import re
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tiny_models import tiny_model as build
from tiny_models import tiny_types
from torch import nn
from torch.nn.modules import module as torch_hooks
from torch.optim import SGD, AdamW
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import hf_blend
from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.model import canary
from hf_blend.model.fingerprint import fingerprint, state_of, structure_digest
from hf_blend.model.identity import weights

IDS = torch.arange(3, 35)[None]
CHUNKS = [list(range(10, 40)), list(range(50, 90))]


@torch.no_grad()
def kv(model: nn.Module) -> list[torch.Tensor]:
    """What a plain forward of stock transformers computes: the oracle, which knows no fingerprint."""
    cache = DynamicCache()
    logits = model(IDS, past_key_values=cache).logits
    return [logits, *(states for layer in cache.layers for states in (layer.keys, layer.values))]


def differs(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.equal(got, expected) for got, expected in zip(one, other, strict=True))


def scaled(function: Callable[..., torch.Tensor], by: float) -> Callable[..., torch.Tensor]:
    return lambda *args, **kwargs: function(*args, **kwargs) * by


def mlp_of(model: nn.Module) -> Any:
    return model.model.layers[1].mlp


def weight_of(model: nn.Module) -> Any:
    return mlp_of(model).down_proj.weight


def trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer], part: nn.Module | None = None) -> None:
    """One step of an optimizer, all but a part frozen."""
    one = make((model if part is None else part).parameters())
    model(IDS, labels=IDS).loss.backward()
    one.step()


def averaged(model: nn.Module) -> None:
    for weight in model.parameters():  # as an exponential moving average is swapped in
        weight.data.lerp_(torch.randn_like(weight), 0.05)


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


def patched_forward(model: nn.Module, by: float = 1.2) -> None:
    mlp_of(model).forward = scaled(mlp_of(model).forward, by)


def wrapped_forward(model: nn.Module) -> None:
    inner = mlp_of(model).forward
    mlp_of(model).forward = functools.wraps(inner)(lambda states: inner(states) * 2)


def bound_method(model: nn.Module) -> None:
    mlp = mlp_of(model)
    mlp.forward = types.MethodType(lambda self, states: self.down_proj(self.act_fn(self.gate_proj(states))), mlp)


def own_activation(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = lambda states: states.clamp_min(0)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 2


def own_attention(model: nn.Module) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 1.5, weights

    ALL_ATTENTION_FUNCTIONS.register("test_identity_attention", attention)
    model.config._attn_implementation = "test_identity_attention"


CHANGES: dict[str, Callable[[Any], Any]] = {  # those of training, steering, serving and research
    "small fused steps": lambda model: trained(model, partial(AdamW, lr=1e-5, fused=True)),
    "a fused step of some layers": lambda model: trained(
        model, partial(AdamW, lr=0.05, fused=True), model.model.layers[1:]
    ),
    "a step of SGD": lambda model: trained(model, partial(SGD, lr=0.1, foreach=True)),
    "data of one element": lambda model: weight_of(model).data[7].fill_(0.5),
    "a norm through data": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(1.1),
    "a weight scaled through data": lambda model: weight_of(model).data.mul_(1.1),
    "a weight copied through data": lambda model: weight_of(model).data.copy_(torch.randn_like(weight_of(model))),
    "all weights averaged through data": averaged,
    "a weight written through numpy": lambda model: weight_of(model).detach().numpy().__imul__(1.1),
    "a weight changed in place": torch.no_grad()(lambda model: weight_of(model).mul_(1.1)),
    "a weight replaced": lambda model: setattr(
        mlp_of(model).down_proj, "weight", nn.Parameter(weight_of(model).detach() * 1.1)
    ),
    "a state dict loaded": lambda model: model.load_state_dict(
        {name: weight * 1.02 for name, weight in model.state_dict().items()}
    ),
    "half() and back": lambda model: model.half().float(),
    "a weight of inference mode": in_inference_mode,
    "two MLPs swapped": swapped,
    "other frequencies": lambda model: model.model.rotary_emb.inv_freq.data.mul_(0.9),
    "attention_scaling": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.2),
    "scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
    "act_fn": lambda model: setattr(mlp_of(model), "act_fn", nn.ReLU()),
    "act_fn of one's own": own_activation,
    "the epsilon of a norm": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
    "is_causal": lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "forward of one module": patched_forward,
    "wrapped forward": wrapped_forward,
    "a method bound to one module": bound_method,
    "forward of another layer": lambda model: setattr(mlp_of(model), "forward", model.model.layers[0].mlp.forward),
    "custom module": lambda model: setattr(model.model.layers[1], "mlp", Doubled(mlp_of(model))),
    "attention of one's own": own_attention,
}
UNSEEN_IN_PLAIN = {"is_causal"}  # sdpa is handed a mask for one prompt or none; the attribute decides elsewhere


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("sampled", [False, True], ids=["whole", "sampled"])
def test_a_model_that_computes_something_else_has_another_fingerprint(name, sampled, tiny_model, monkeypatch):
    model = tiny_model("llama")
    if sampled:
        monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
        if name == "data of one element":
            pytest.skip("a sample may miss single elements, as the docs say")
    before, states = fingerprint(model), kv(model)
    assert fingerprint(model) == before, "running it is no change"
    CHANGES[name](model)
    assert name in UNSEEN_IN_PLAIN or differs(kv(model), states), "nothing is tested"
    assert fingerprint(model) != before


@pytest.mark.parametrize("where", ["", "model.layers.1.mlp", "model.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_others_are_refused_by_name_and_their_removal_restores_the_fingerprint(kind, where, model):
    before = fingerprint(model)
    handle = getattr(model.get_submodule(where), kind)(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=r"the forward hook .*test_identity\..*<lambda>.*handle\.remove"):
        fingerprint(model)
    with pytest.raises(UnsupportedModelError, match="forward hook"):
        BlendCache(model, ChunkStore.open("memory://"))
    handle.remove()
    assert fingerprint(model) == before


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


def test_hooks_that_are_said_to_only_look_and_those_of_the_libraries_are_accepted(model):
    before, seen = fingerprint(model), []
    handle = model.model.layers[0].register_forward_hook(hf_blend.observer(lambda *_: seen.append(1)))
    assert fingerprint(model) == before
    handle.remove()
    model(IDS, output_hidden_states=True, output_attentions=False)
    model.enable_input_require_grads()
    assert any(module._forward_hooks for module in model.modules()), "nothing is tested"
    assert fingerprint(model) == before


def liger_norm(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
    return self.weight * nn.functional.rms_norm(states, states.shape[-1:], eps=1e-2)


def no_rotation(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def test_code_that_is_put_into_a_class_or_a_module_of_transformers_is_seen_and_its_removal_too(model, monkeypatch):
    from transformers.models.llama import modeling_llama as llama

    inner = llama.LlamaMLP.forward
    doubled = functools.wraps(inner)(lambda self, states: inner(self, states) * 2)
    before, states = fingerprint(model), kv(model)
    for owner, name, value in (
        (llama.LlamaRMSNorm, "forward", liger_norm),
        (llama, "apply_rotary_pos_emb", no_rotation),
        (llama.LlamaMLP, "forward", doubled),
        (llama.LlamaMLP, "forward", llama.LlamaRMSNorm.forward),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            if value is not llama.LlamaRMSNorm.forward:
                assert differs(kv(model), states), name
            assert fingerprint(model) != before, name
        assert fingerprint(model) == before, name


class Disturbed(TorchFunctionMode):
    """Changes what a model computes, and no attribute of it."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.cos or function is torch.Tensor.cos else found


SILENT = {  # what docs/security.md says is not seen
    "torch.nn.functional": lambda patch, _: patch.setattr(nn.functional, "silu", scaled(nn.functional.silu, 1.1)),
    "torch.Tensor": lambda patch, _: patch.setattr(torch.Tensor, "cos", lambda states: torch.cos(states) * 1.1),
    "a closure": lambda _, vector: vector.data.mul_(2),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_the_docs_say_is_not_seen_is_found_by_the_canary_of_a_fresh_look(name, model, monkeypatch):
    vector, mlp = torch.ones(64), model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda states: inner(states) + vector
    before, own = fingerprint(model), canary.canary_of(model)
    SILENT[name](monkeypatch, vector)
    assert fingerprint(model) == before, "more is seen: say so in docs/security.md"
    fingerprint(model, reread=True)
    assert not canary.is_of_model(model, own)


def test_each_patch_counts_as_itself(model):
    plain = fingerprint(model)
    seen, mlp = {plain}, mlp_of(model)
    for by in (1.5, 2.0):
        patched_forward(model, by)
        seen.add(fingerprint(model))
        patch = mlp.forward
        del mlp.forward
    assert len(seen) == 3
    assert fingerprint(model) == plain
    mlp.forward = patch
    assert fingerprint(model) in seen - {plain}, "chunks that it computed are found again"


def test_custom_code_counts_by_its_file_and_is_the_same_in_another_module(model, tmp_path, monkeypatch):
    source = (
        "import torch\nfrom torch import nn\nSCALE = {scale}\ndef twice(x):\n    return x * SCALE\n"
        "class Custom(nn.Module):\n    def __init__(self, inner):\n        super().__init__()\n"
        "        self.inner = inner\n    def forward(self, states):\n        return twice(self.inner(states))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    mlp, seen = model.model.layers[1].mlp, {}
    for name, scale in (("custom_one", 2), ("custom_two", 3), ("custom_three", 2)):
        (tmp_path / f"{name}.py").write_text(source.format(scale=scale))
        model.model.layers[1].mlp = __import__(name).Custom(mlp)
        seen[name] = fingerprint(model)
    assert seen["custom_one"] != seen["custom_two"]
    assert seen["custom_one"] == seen["custom_three"]
    custom = __import__("custom_three")
    for owner, name in ((custom, "twice"), (custom.Custom, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *given: given[-1] * 5)
            assert fingerprint(model) != seen["custom_three"]
        assert fingerprint(model) == seen["custom_three"]


def refuses(given: nn.Module, text: str) -> None:
    store = ChunkStore.open("memory://")
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


def test_wrappers_and_models_without_a_head_are_refused_with_what_to_pass(model):
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


def test_nothing_is_stored_if_the_model_changes_while_a_chunk_is_computed(model, monkeypatch):
    captured = canary.capture_chunks

    def train(*arguments: Any) -> Any:
        chunks = captured(*arguments)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        return chunks

    monkeypatch.setattr(canary, "capture_chunks", train)
    store = ChunkStore.open("memory://")
    with pytest.raises(UnsupportedModelError, match="changed while a chunk was computed"):
        store.add(model, None, CHUNKS)
    assert len(store) == 0


def chunks_of(store: ChunkStore, model: nn.Module) -> list[torch.Tensor]:
    keys = store.add(model, None, CHUNKS)
    return [states for key in keys for layer in store.get(key).layers for states in layer]


def test_chunks_of_a_model_in_training_are_those_of_evaluation_and_it_stays_so_after_an_exception(tiny_model):
    model = tiny_model("llama", num_hidden_layers=2, attention_dropout=0.5)
    expected = chunks_of(ChunkStore.open("memory://"), model)
    model.train()
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    assert not differs(chunks_of(ChunkStore.open("memory://"), model), expected)
    assert [module.training for module in model.modules()] == modes
    model.model.layers[1].mlp.down_proj.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        chunks_of(ChunkStore.open("memory://"), model)
    assert [module.training for module in model.modules()] == modes


def test_chunks_are_computed_without_autocast_and_requests_under_it_are_refused(model):
    store, expected = ChunkStore.open("memory://"), chunks_of(ChunkStore.open("memory://"), model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not differs(chunks_of(store, model), expected)
        BlendCache(model, store)  # the self-test is not misled
        with pytest.raises(ConfigError, match=r"autocast is on \(bfloat16 on cpu\).*Leave the autocast block"):
            generate(model, store)
        assert torch.is_autocast_enabled("cpu")
    assert len(store) == len(CHUNKS), "the prefix was neither computed nor stored"


def test_gradient_checkpointing_in_training_is_refused_by_name(model):
    model.gradient_checkpointing_enable()
    model.train()
    store = ChunkStore.open("memory://")
    with pytest.raises(ConfigError, match=r"2 layers of LlamaForCausalLM checkpoint their gradients.*model\.eval"):
        generate(model, store)
    model.eval()
    assert generate(model, store).report.computed_chunks == 3


class Counted(TorchDispatchMode):
    """How often values were asked for on the host, and how many bytes of weights were touched."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronised = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("item", "_local_scalar_dense", "equal", "nonzero")
        self.synchronised += function.overloadpacket in [getattr(torch.ops.aten, name) for name in waits]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_second_look_synchronises_once_and_reads_no_weight(sampled, model, monkeypatch):
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0 if sampled else weights.WHOLE_BYTES)
    model.model.embed_tokens.to(torch.bfloat16)
    before = fingerprint(model)
    monkeypatch.setattr(weights, "checksum", lambda _: pytest.fail("a weight was read"))
    with Counted() as counted:
        assert fingerprint(model) == before
    assert counted.synchronised == 1


def test_a_sample_reads_the_last_element_and_of_the_first_ones_of_every_tensor(model, monkeypatch):
    monkeypatch.setattr(weights, "WHOLE_BYTES", 0)
    seen = {fingerprint(model)}
    for weight in model.parameters():
        for place in (slice(0, 16), -1):
            weight.detach().view(-1).numpy()[place] += 1
            seen.add(fingerprint(model))
    assert len(seen) == 1 + 2 * len([*model.parameters()])
    before = fingerprint(model)
    model.model.layers[1].mlp.up_proj.weight.detach().numpy()[1, 1] += 1
    assert fingerprint(model) == before, "the sample has grown: say so in the docs"
    assert fingerprint(model, reread=True) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nan_is_itself(dtype, model):
    model.to(dtype)
    model.model.layers[0].mlp.up_proj.weight.data[0] = float("nan")
    before = fingerprint(model)
    state = state_of(model)
    assert fingerprint(model) == before
    assert state_of(model) == state, "it was not taken for a change"


def test_a_patched_model_is_forgotten_too(tiny_model):
    model = tiny_model("llama", num_hidden_layers=1)
    patch = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)
    model.forward = patch
    fingerprint(model)
    ref = weakref.ref(model)
    del model, patch
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_move_with_the_prompt_are_no_change(kind, tiny_model):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 16}
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **(factors if kind == "longrope" else {})}
    model = tiny_model("llama", num_hidden_layers=1, rope_parameters=rope, max_position_embeddings=16)
    before, states = fingerprint(model), set()
    for tokens in (30, 8, 40, 8, 50):
        model(torch.arange(tokens)[None] + 3)
        assert fingerprint(model) == before
        states.add(state_of(model))
    assert len(states) <= 2, "an attribute that was written for the first time may be looked at once"


@pytest.mark.parametrize(
    ("change", "computed"),
    [(lambda found: found, 0), (lambda found: found * (1 + 1e-4), 0), (lambda found: found * 1.1, 1)],
    ids=["same", "noise", "other"],
)
def test_a_chunk_with_another_canary_is_a_miss_of_its_own_and_computed(change, computed, model):
    store = ChunkStore.open("memory://")
    [key] = store.add(model, None, CHUNKS[:1])
    chunk = store.get(key)
    numbers = change(canary._decoded(chunk.canary))
    store.delete(key)
    store.put(dataclasses.replace(chunk, canary=base64.b64encode(numbers.numpy().tobytes()).decode()))
    cache = BlendCache(model, store)
    inputs = cache.inputs(None, prefix=[1], chunks=CHUNKS[:1], question=[7, 8])
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.report.computed_chunks == computed + 1, "what the prompt begins with was not stored"
    assert store.stats()["misses"].get("canary", 0) == computed
    assert store.get(key).canary == canary.canary_of(model) or not computed


@pytest.mark.parametrize("text", ["!", "AAAA", "x" * 400])
def test_a_canary_that_is_none_is_of_no_model(text, model):
    fingerprint(model)
    assert not canary.is_of_model(model, text)


def test_a_canary_sees_what_a_fingerprint_cannot_and_is_the_same_with_another_attention(model):
    before = fingerprint(model)
    own = canary.canary_of(model)
    model.set_attn_implementation("eager")
    assert fingerprint(model) == before
    assert canary.is_of_model(model, own)

    twin = copy.deepcopy(model)
    with Disturbed():  # no attribute of the model
        assert fingerprint(twin) == before, "it has grown: take another change"
        assert not canary.is_of_model(twin, own)


@pytest.fixture
def adapted(model):
    """A model with two trained adapters of PEFT, "a" active."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config, adapter_name="a")
    adapted.add_adapter("b", config)
    return adapted.eval()


def test_adapters_count_by_weights_scale_and_whether_they_act(adapted):
    seen = {"a": fingerprint(adapted)}
    adapted.set_adapter("b")
    seen["b"] = fingerprint(adapted)
    adapted.set_adapter("a")
    assert fingerprint(adapted) == seen["a"]
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    layer.scale_layer(2.0)
    seen["scaled"] = fingerprint(adapted)
    layer.unscale_layer(2.0)
    assert fingerprint(adapted) == seen["a"]
    with adapted.disable_adapter():
        seen["off"] = fingerprint(adapted)
    layer.lora_A["a"].weight.data.mul_(1.5)
    seen["trained"] = fingerprint(adapted)
    adapted.merge_adapter()
    seen["merged"] = fingerprint(adapted)
    assert len(set(seen.values())) == len(seen)


@pytest.mark.parametrize("call", ["generate", "forward"])
def test_adapters_that_are_chosen_per_request_are_refused(call, adapted):
    store = ChunkStore.open("memory://")
    cache = BlendCache(adapted, store)
    inputs = cache.inputs(None, chunks=CHUNKS, question=[7, 8, 9])
    given = {**inputs, "past_key_values": cache, "adapter_names": ["b"]}
    cache.get_seq_length()  # as generate does: the model is watched from here
    run = adapted if call == "forward" else partial(adapted.generate, max_new_tokens=2, do_sample=False)
    with pytest.raises(UnsupportedModelError, match="for this request alone"):
        run(**given)
    assert len(store) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model_type", tiny_types())
def test_running_a_model_of_any_type_is_no_change(model_type):
    try:
        model = build(model_type)
    except hf_blend.HfBlendError as refused:
        pytest.skip(str(refused))
    before = fingerprint(model)
    state = state_of(model)
    for _ in range(2):
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        assert fingerprint(model) == before
    assert state_of(model) <= state + 1, "hooks that transformers keeps in a model may be looked at once"
    with contextlib.suppress(ValueError):  # some know one attention only
        model.set_attn_implementation("eager")
    assert fingerprint(model) == before


def test_what_has_the_address_of_what_it_replaced_is_another(model):
    layer = model.model.layers[0]
    layer.change = partial(torch.add, other=1)
    before, address, others = structure_digest(model), id(layer.change), []
    del layer.change
    while id(other := partial(torch.add, other=2)) != address and len(others) < 100_000:
        others.append(other)
    assert id(other) == address
    layer.change = other
    assert structure_digest(model) != before


class Slots:
    __slots__ = ("by",)

    def __init__(self, by: Any) -> None:
        self.by = by


class Mode(enum.Enum):
    FAST = 1


def nested(by: Any) -> Any:
    for _ in range(40):
        by = types.SimpleNamespace(inner=by)
    return by


def looped(by: Any) -> Any:
    ring = types.SimpleNamespace(by=by, items=[])
    ring.items.append(ring.items)
    ring.own = ring
    return ring


READ_ALIKE = {  # pairs of values that an attribute may have, of which a forward makes something else
    "slots": (Slots(1), Slots(2)),
    "a partial of slots": (partial(torch.add, other=Slots(1)), partial(torch.add, other=Slots(2))),
    "objects in objects": (nested(1), nested(2)),
    "objects in a circle": (looped(1), looped(2)),
    "numbers of numpy": (np.float32(1), np.float32(2)),
    "kinds of numbers of numpy": (np.float32(3), np.float64(3)),
    "arrays": (np.ones(3), np.zeros(3)),
    "shapes of arrays": (np.ones((1, 4)), np.ones((2, 2))),
    "arrays of objects": (np.array([1, None], object), np.array([2, None], object)),
    "deques": (deque([1]), deque([2])),
    "lengths of deques": (deque([1], 3), deque([1], 4)),
    "patterns": (re.compile("a"), re.compile("b")),
    "bytes that change": (bytearray(b"a"), bytearray(b"b")),
    "fractions": (Fraction(1, 2), Fraction(1, 3)),
    "getters": (operator.itemgetter(1), operator.itemgetter(2)),
    "methods of numbers": ((2.0).__mul__, (3.0).__mul__),
    "methods of tensors": (torch.tensor(2.0).mul, torch.tensor(3.0).mul),
    "closures of torch": (torch.vmap(torch.sin, in_dims=0), torch.vmap(torch.sin, in_dims=1)),
    "functions without names": (staticmethod(lambda x: x), staticmethod(lambda x: x)),
    "iterators that cannot be read": ((x for x in [1]), (x for x in [2])),
    "weak references": (weakref.ref(nn.Linear), weakref.ref(nn.Bilinear)),
    "modules of Python": (operator, functools),
    "lists of modules": ([nn.ReLU()], [nn.GELU()]),
    "a list and a tuple": ([1, 2], (1, 2)),
    "a list and a set": (["1"], {"1"}),
    "a number and a member": (1, Mode.FAST),
    "a dtype and its name": (torch.float32, "torch.float32"),
    "names and numbers in a dict": ({1: 2}, {"1": 2}),
    "dicts with an order": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
}


def test_fingerprint_of_attributes_that_compute_something_else_is_another(model):
    mlp, seen, alike, moving = mlp_of(model), {fingerprint(model)}, [], []
    for name, pair in READ_ALIKE.items():
        for value in pair:
            mlp.extra = value
            digest = fingerprint(model)
            alike += [name] if digest in seen else []
            moving += [] if digest == fingerprint(model) else [name]
            seen.add(digest)
    assert not alike
    assert not moving


def test_what_cannot_be_read_nor_kept_apart_is_refused_by_its_path(model):
    mlp_of(model).extra = [memoryview(b"a").__iter__()]
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.extra\.0 is a .*nothing can be read"):
        fingerprint(model)
    mlp_of(model).extra = functools.reduce(lambda inner, _: [inner], range(5000), 1)
    with pytest.raises(UnsupportedModelError, match="nested too deeply"):
        fingerprint(model)


def test_fingerprint_does_not_depend_on_the_order_in_which_names_were_set(model):
    def digest(order: int) -> str:
        layer, shared = copy.deepcopy(model).model.layers[1], types.SimpleNamespace(by=1)
        for name in ("first", "second", "third")[::order]:
            setattr(layer, name, {"first": shared, "second": {"a": 1, "b": 2}, "third": shared}[name])
            layer.register_buffer(f"{name}_buffer", torch.full((2,), float(len(name))))
        layer.second = dict([*layer.second.items()][::order])
        found = copy.deepcopy(model)
        found.model.layers[1] = layer
        return fingerprint(found)

    assert digest(1) == digest(-1)


def shared_modules(model: Any, source: int) -> None:
    model.model.layers[2].mlp = model.model.layers[source].mlp


def tied_weights(model: Any, source: int) -> None:
    norms = [layer.input_layernorm for layer in model.model.layers]
    norms[1].weight.data.mul_(2)
    norms[2].weight = norms[source].weight


def shared_tensors(model: Any, source: int) -> None:
    tensors = torch.ones(2), torch.zeros(2)
    model.model.first, model.model.second, model.model.third = *tensors, tensors[source]


def shared_objects(model: Any, source: int) -> None:
    objects = types.SimpleNamespace(by=1), types.SimpleNamespace(by=1)
    model.model.first, model.model.second, model.model.third = *objects, objects[source]


def swapped_order(model: Any, source: int) -> None:
    names = ("0", "1") if source else ("1", "0")
    model.model.norm = nn.Sequential(OrderedDict((name, nn.GELU() if name == "0" else nn.ReLU()) for name in names))


def classes_of_one_name(model: Any, source: int) -> None:
    named = [
        type("Norm", (nn.Module,), {"__module__": "torch.nn"}),
        type("Norm", (nn.Module,), {"__module__": "torch"}),
    ]
    model.model.norm = nn.Sequential(*(kind() for kind in (*named, named[source])))


@pytest.mark.parametrize(
    "change", [shared_modules, tied_weights, shared_tensors, shared_objects, swapped_order, classes_of_one_name]
)
def test_fingerprint_says_which_of_two_is_met_again(change, tiny_model):
    model, seen = tiny_model("llama", num_hidden_layers=3), set()
    for source in (0, 1):
        changed = copy.deepcopy(model)
        change(changed, source)
        seen |= {fingerprint(changed), fingerprint(copy.deepcopy(changed))}
    assert len(seen) == 2


def test_weights_that_torch_packs_for_int8_are_known_in_this_process(model):
    other = copy.deepcopy(model)
    mlp_of(other).up_proj.weight.data.mul_(2)
    first, second = (torch.ao.quantization.quantize_dynamic(twin, {nn.Linear}) for twin in (model, other))
    assert fingerprint(first) != fingerprint(second)
    assert fingerprint(first) == fingerprint(first)


def test_hooks_of_others_behind_accelerates_door_are_seen(model):
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2

    before, states = fingerprint(model), kv(model)
    add_hook_to_module(mlp_of(model), Doubling())
    assert differs(kv(model), states), "nothing is tested"
    assert fingerprint(model) != before


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_tables_that_stay_while_others_move_with_the_prompt_are_seen(kind, tiny_model):
    factors = {"short_factor": [1.0] * 128, "long_factor": [2.0] * 128, "original_max_position_embeddings": 16}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **(factors if kind == "longrope" else {})}
    layers = ["sliding_attention", "full_attention"]
    parameters = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": rope}
    model = tiny_model(
        "gemma3_text", num_hidden_layers=2, rope_parameters=parameters, layer_types=layers, max_position_embeddings=16
    )
    before, tables = fingerprint(model), model.model.rotary_emb
    for tokens in (30, 8):
        model(torch.arange(tokens)[None] + 3)
        assert fingerprint(model) == before
    for name in ("sliding_attention_inv_freq", "full_attention_original_inv_freq"):
        getattr(tables, name).mul_(0.5)
        changed = fingerprint(model)
        assert changed != before, name
        before = changed


def test_frequencies_are_seen_where_the_config_says_dynamic_of_something_else(model):
    model.config.quantization_config = {"type": "dynamic"}
    before = fingerprint(model)
    model.model.rotary_emb.inv_freq.mul_(0.5)
    assert fingerprint(model) != before


class Scaled:
    """A callable with a state, which a class may hold in the place of a method."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, *args: Any) -> torch.Tensor:
        return args[-1] * self.by


class Bound(Scaled):
    """A descriptor of one's own."""

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., torch.Tensor]:
        return self.__call__


def scale(module: nn.Module, states: torch.Tensor, by: float = 1.0, object: Any = None) -> torch.Tensor:
    return states * (by if object is None else object.by)


PUT = {  # in the place of a method, a function of a number, and where that number is
    "a partial method": lambda one: functools.partialmethod(scale, object=one),
    "a descriptor": lambda one: one,
    "a callable object": lambda one: Scaled.__call__.__get__(one),
    "a static callable": lambda one: staticmethod(one),
    "a property": lambda one: property(partial(lambda scaled, _: scaled, one)),
    "a partial": lambda one: partial(scale, None, object=one),
}


@pytest.mark.parametrize("is_own", [False, True], ids=["a class of transformers", "a class of one's own"])
@pytest.mark.parametrize("name", PUT)
def test_what_runs_in_the_place_of_a_method_counts_with_its_state(name, is_own, model, monkeypatch):
    if is_own:
        for layer in model.model.layers:
            layer.mlp = Doubled(layer.mlp)
    seen, states, one = {fingerprint(model)}, [kv(model)], Bound(2.0)
    with monkeypatch.context() as patch:
        patch.setattr(type(mlp_of(model)), "forward", PUT[name](one))
        for by in (2.0, 3.0):
            one.by = by
            assert all(differs(kv(model), others) for others in states), "nothing is tested"
            states.append(kv(model))
            seen.add(fingerprint(model))
            assert fingerprint(model) in seen
    assert len(seen) == 3
    assert fingerprint(model) in seen, "its removal is seen too"
    mlp_of(model).forward = Scaled(2.0)
    seen.add(fingerprint(model))
    mlp_of(model).forward.by = 3.0
    assert len(seen | {fingerprint(model)}) == 5, "of one module"


def test_what_runs_in_the_place_of_a_function_of_transformers_counts_with_its_state(model, monkeypatch):
    from transformers.models.llama import modeling_llama as llama

    seen, rotate = {fingerprint(model)}, Scaled(2.0)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", lambda q, k, *_: (q, k))
    seen.add(fingerprint(model))
    for put in (partial(no_rotation, by=1), rotate):
        monkeypatch.setattr(llama, "apply_rotary_pos_emb", put)
        seen.add(fingerprint(model))
    rotate.by = 3.0
    assert len(seen | {fingerprint(model)}) == 5


OWN = """
import torch
from torch import nn
class Shared:
    by = 1.0
class Custom(nn.Module, Shared):
    scale, table, parts = 1.0, torch.ones(1), {"by": [1.0]}
    padding_idx = 1.0
    def __init__(self, inner):
        super().__init__()
        self.inner, self.compute_dtype, self.loss_type, self.max_seq_len_cached = inner, 1.0, "none", 7
    def forward(self, states):
        by = self.scale * self.table * self.parts["by"][0] * self.by * self.padding_idx
        return self.inner(self.twice(states)) * by * self.compute_dtype * len(self.loss_type)
    def twice(self, states):
        return states * 2
    def other(self, states):
        return states
"""


def own_module(name: str, model: Any, tmp_path: Any) -> Any:
    """The MLP of a layer in a module of a class that only a file with this name has."""
    (tmp_path / f"{name}.py").write_text(OWN)
    mlp = mlp_of(model)
    model.model.layers[1].mlp = __import__(name).Custom(getattr(mlp, "inner", mlp))
    return mlp_of(model)


OWN_CHANGES: dict[str, Callable[[Any], Any]] = {
    "a number of the class": lambda mlp: setattr(type(mlp), "scale", 2.0),
    "a number of a base": lambda mlp: setattr(type(mlp).__bases__[1], "by", 2.0),
    "a number in what the class holds": lambda mlp: type(mlp).parts["by"].__setitem__(0, 2.0),
    "a tensor of the class": lambda mlp: type(mlp).table.mul_(2),
    "a method that is another": lambda mlp: setattr(type(mlp), "forward", type(mlp).other),
    "a method beside forward that is another": lambda mlp: setattr(type(mlp), "twice", type(mlp).other),
    "a number that the class overrides": lambda mlp: setattr(type(mlp), "padding_idx", 2.0),
    "a name that libraries use": lambda mlp: setattr(mlp, "compute_dtype", 2.0),
    "a name of models": lambda mlp: setattr(mlp, "loss_type", "other"),
}


def test_values_of_classes_of_ones_own_count_and_names_that_their_code_reads(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    first, seen = fingerprint(model), dict[str, str]()
    for number, (name, change) in enumerate(OWN_CHANGES.items()):
        changed = []
        for copied in range(2):  # as in another process
            mlp = own_module(f"own_{number}_{copied}", model, tmp_path)
            before, states = fingerprint(model), kv(model)
            assert before == seen.setdefault("", before)
            change(mlp)
            assert differs(kv(model), states), f"{name}: nothing is tested"
            changed.append(fingerprint(model))
        assert changed[0] == changed[1], name
        seen[name] = changed[0]
    assert len({first, *seen.values()}) == 2 + len(OWN_CHANGES)


def test_names_that_the_code_of_ones_own_does_not_read_do_not_count(model, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    mlp = own_module("own_unread", model, tmp_path)
    before = fingerprint(model)
    mlp._is_hf_initialized, mlp.hf_device_map, mlp.gradient_checkpointing = True, {"": 0}, True
    assert fingerprint(model) == before
    model.model.layers[0].mlp.padding_idx = 5
    assert fingerprint(model) == before, "of a class of transformers"


def test_forward_that_was_put_over_that_of_accelerate_is_seen(model):
    add_hook_to_module(mlp_of(model), ModelHook())
    before, states, inner = fingerprint(model), kv(model), mlp_of(model).forward
    mlp_of(model).forward = lambda states: inner(states) * 2
    assert differs(kv(model), states), "nothing is tested"
    assert fingerprint(model) != before


def test_views_of_memory_count_by_what_is_in_them(model, tmp_path):
    content, numbers = bytearray(b"12345678"), np.array([1, 2, None], object)
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "r+b") as file, mmap.mmap(file.fileno(), 8) as mapped:
        for owner in (content, mapped):
            view, seen = memoryview(owner), set()
            for value in (owner, view[::2], view.cast("i"), view):
                mlp_of(model).extra = value
                seen.add(fingerprint(model))
            owner[0:1] = b"9"
            changed = fingerprint(model)
            mlp_of(model).extra = memoryview(bytes(owner))  # as in another process
            assert fingerprint(model) == changed
            assert len(seen | {changed}) == 5
            view.release()
    mlp_of(model).extra = memoryview(numbers)
    before = fingerprint(model)
    numbers[1] = 3
    assert fingerprint(model) != before
    mlp_of(model).extra = released = memoryview(content)
    released.release()
    assert fingerprint(model) == fingerprint(model)


class Item:
    def __init__(self, by: Any) -> None:
        self.by = by


@pytest.mark.parametrize("kind", [weakref.WeakSet, set, frozenset])
def test_sets_do_not_depend_on_the_order_in_memory_and_know_their_items(kind, model):
    def digest(order: list[int], last: int, again: int) -> str:
        items = {at: Item([last if at == 6 else at]) for at in order}  # in another order of addresses each time
        kept.extend(items.values())
        mlp_of(model).extra, mlp_of(model).zero = kind(items.values()), items[again]
        return fingerprint(model)

    kept: list[Any] = []
    orders = [random.Random(seed).sample(range(7), 7) for seed in range(6)]
    assert len({digest(order, 6, 3) for order in orders}) == 1
    assert len({digest(orders[0], last, again) for last in (6, 7) for again in range(7)}) == 14


@pytest.mark.parametrize("kind", [weakref.WeakSet, set, frozenset])
def test_set_of_tensors_is_refused_by_its_path_but_for_weights_met_before(kind, model):
    vector = torch.ones(2)
    mlp_of(model).extra = kind([model.model.layers[0].mlp.down_proj.weight])
    fingerprint(model)
    mlp_of(model).extra = kind([vector])
    with pytest.raises(UnsupportedModelError, match=r"mlp\.extra is a set with a tensor, .* Use a list"):
        fingerprint(model)


def calls_of(look: Callable[[], Any]) -> int:
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        look()
    finally:
        sys.setprofile(None)
    return calls


def test_look_at_a_stock_model_takes_few_calls(tiny_model):
    """Of Python's functions, in a second look; a time would be another on each machine."""
    counts = []
    for layers in (2, 4):
        model = tiny_model("llama", num_hidden_layers=layers)
        fingerprint(model)
        counts.append(calls_of(lambda model=model: structure_digest(model)))
    modules = len([*model.model.layers[0].modules()])
    assert (counts[1] - counts[0]) / (2 * modules) < 12, "of a module"
    assert counts[0] < 1350, "of a model of two layers"
