# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever changes what a forward computes gives another fingerprint, or a refusal that names it."""

import base64
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import types
import weakref
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from tiny_models import tiny_model as build
from tiny_models import tiny_types
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import hf_blend
from hf_blend import BlendCache, ChunkStore, observer
from hf_blend.errors import ConfigError, UnsupportedModelError
from hf_blend.model import canary
from hf_blend.model.fingerprint import fingerprint, state_of, structure_digest
from hf_blend.model.identity import watch, weights
from hf_blend.model.identity.structure import Structure
from tests.faults.changes import LASTING

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


def patch_forward(model: nn.Module, by: float = 1.5) -> None:
    mlp = model.model.layers[1].mlp
    mlp.forward = scaled(mlp.forward, by)


def wrapped_forward(model: nn.Module) -> None:
    mlp, inner = model.model.layers[1].mlp, model.model.layers[1].mlp.forward
    mlp.forward = functools.wraps(inner)(lambda states: inner(states) * 2)


def own_activation(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = lambda states: states.clamp_min(0)


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 2


def custom_module(model: nn.Module) -> None:
    model.model.layers[1].mlp = Doubled(model.model.layers[1].mlp)


def own_attention(model: nn.Module) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(*args: Any, **kwargs: Any) -> Any:
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 1.5, weights

    ALL_ATTENTION_FUNCTIONS.register("test_identity_attention", attention)
    model.config._attn_implementation = "test_identity_attention"


def small_steps(model: nn.Module) -> None:
    one = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model(IDS, labels=IDS).loss.backward()
    one.step()


CHANGES: dict[str, Callable[[nn.Module], Any]] = {  # beside those of `tests.faults.changes`
    "small fused steps": small_steps,
    "data of one element": lambda model: model.model.layers[1].mlp.up_proj.weight.data[7].fill_(0.5),
    "a norm through data": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(1.1),
    "act_fn of one's own": own_activation,
    "wrapped forward": wrapped_forward,
    "custom module": custom_module,
    "attention of one's own": own_attention,
    "swapped layers": lambda model: model.model.layers.__init__(reversed([*model.model.layers])),
}
UNSEEN_IN_PLAIN = {"is_causal"}  # sdpa is handed a mask for one prompt or none; the attribute decides elsewhere


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=2)


@pytest.mark.parametrize("name", [*CHANGES, *LASTING])
@pytest.mark.parametrize("sampled", [False, True], ids=["whole", "sampled"])
def test_a_model_that_computes_something_else_has_another_fingerprint(name, sampled, tiny_model, monkeypatch):
    model = tiny_model("llama")
    if sampled:
        monkeypatch.setattr(watch, "WHOLE_BYTES", 0)
        if name == "data of one element":
            pytest.skip("a sample may miss single elements, as the docs say")
    before, states = fingerprint(model), kv(model)
    assert fingerprint(model) == before, "running it is no change"
    CHANGES[name](model) if name in CHANGES else LASTING[name](model, Random(0))
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


@pytest.mark.parametrize(
    "register", [nn.modules.module.register_module_forward_hook, nn.modules.module.register_module_forward_pre_hook]
)
def test_hooks_on_every_module_are_refused(register, model):
    before = fingerprint(model)
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


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def liger_norm(self: nn.Module, states: torch.Tensor) -> torch.Tensor:
    return self.weight * nn.functional.rms_norm(states, states.shape[-1:], eps=1e-2)


def no_rotation(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def test_code_that_is_put_into_a_class_or_a_module_of_transformers_is_seen_and_its_removal_too(model):
    from transformers.models.llama import modeling_llama as llama

    inner = llama.LlamaMLP.forward
    doubled = functools.wraps(inner)(lambda self, states: inner(self, states) * 2)
    before, states = fingerprint(model), kv(model)
    for owner, name, value in (
        (llama.LlamaRMSNorm, "forward", liger_norm),
        (llama, "apply_rotary_pos_emb", no_rotation),
        (llama.LlamaMLP, "forward", doubled),
        (llama.LlamaMLP, "forward", llama.LlamaRMSNorm.forward),
        (nn.functional, "silu", scaled(nn.functional.silu, 1.1)),
    ):
        with patched(owner, name, value):
            if value is not llama.LlamaRMSNorm.forward:
                assert differs(kv(model), states), name
            assert fingerprint(model) != before, name
        assert fingerprint(model) == before, name


class Disturbed(TorchFunctionMode):
    """Changes what a model computes, and no attribute of it."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.cos or function is torch.Tensor.cos else found


class Shifted(TorchDispatchMode):
    """Likewise, below autograd."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        return found + 1 if function.overloadpacket is torch.ops.aten.rsqrt else found


@pytest.mark.parametrize("mode", [Disturbed, Shifted])
def test_an_active_mode_of_torch_is_refused_by_name_and_leaves_nothing_behind(mode, model):
    store, before = ChunkStore.open("memory://"), kv(model)
    with mode():
        assert differs(kv(model), before), "or this test would show nothing"
        with pytest.raises(ConfigError, match=rf"the mode \S*{mode.__name__} is active.*hf_blend\.observer"):
            generate(model, store)
        with pytest.raises(ConfigError, match=rf"{mode.__name__} is active.*Leave its block"):
            store.add(model, None, CHUNKS)
    assert len(store) == 0
    assert generate(model, store).report.computed_chunks == 3
    with mode(), pytest.raises(ConfigError, match=mode.__name__):
        generate(model, store)


def test_modes_that_only_look_and_those_of_torch_are_accepted(model):
    store = ChunkStore.open("memory://")
    with observer(Counted()), torch.device("cpu"), FlopCounterMode(display=False):
        assert generate(model, store).report.computed_chunks == 3


TORCH_PATCHES = {
    "torch.Tensor.cos": (torch.Tensor, "cos", lambda states: torch.cos(states) * 1.0),  # a rotation still
    "torch.rsqrt": (torch, "rsqrt", lambda states: states.sqrt().reciprocal() + 1),
    "torch.Tensor.__matmul__": (torch.Tensor, "__matmul__", lambda left, right: torch.matmul(left, right) * 2),
}


@pytest.mark.parametrize("name", TORCH_PATCHES)
def test_functions_of_torch_and_of_tensors_that_are_replaced_are_seen_and_their_removal_too(name, model, monkeypatch):
    owner, attribute, value = TORCH_PATCHES[name]
    before, store = fingerprint(model), ChunkStore.open("memory://")
    assert generate(model, store).report.computed_chunks == 3
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, value, raising=False)
        assert fingerprint(model) != before
        assert name in json.dumps(Structure(model).parts)
        assert generate(model, store).report.loaded_chunks == 0
    assert fingerprint(model) == before


def test_a_function_of_torch_that_is_replaced_by_another_of_torch_is_noticed(model):
    fingerprint(model)
    before = state_of(model)
    with patched(torch, "rsqrt", torch.sqrt):
        fingerprint(model)
        assert state_of(model) == before + 1


def test_what_patched_code_holds_counts(model):
    plain = fingerprint(model)
    seen = {plain}
    for by in (1.5, 2.0):
        patch_forward(model, by)
        seen.add(fingerprint(model))
        del model.model.layers[1].mlp.forward
    vector = torch.ones(64)
    mlp = model.model.layers[1].mlp
    inner = mlp.forward
    mlp.forward = lambda states: inner(states) + vector
    seen.add(fingerprint(model))
    vector.data.mul_(2)
    seen.add(fingerprint(model))
    del mlp.forward
    assert len(seen) == 5
    assert fingerprint(model) == plain


def test_a_patch_with_a_model_of_its_own_is_refused_by_name(model):
    mlp, helper = model.model.layers[1].mlp, nn.Linear(64, 64)
    mlp.forward = lambda states: helper(states)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.forward \(helper\) is a Linear"):
        fingerprint(model)


def test_custom_code_counts_by_its_code_and_is_the_same_in_another_module(model, tmp_path, monkeypatch):
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
    __import__("custom_three").SCALE = 5
    assert fingerprint(model) != seen["custom_three"]


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
    with pytest.raises(UnsupportedModelError, match="compiled"):
        BlendCache(given, ChunkStore.open("memory://"))
    with pytest.raises(UnsupportedModelError, match="compiled"):
        ChunkStore.open("memory://").add(given, None, CHUNKS)


def test_wrappers_and_models_without_a_head_are_refused_with_what_to_pass(model):
    class Engine(nn.Module):
        module = model

    store = ChunkStore.open("memory://")
    for given, text in (
        (nn.DataParallel(model), r"DataParallel is a wrapper .* Pass the model inside it \(model\.module\)"),
        (Engine(), r"Engine is a wrapper"),
        (model.model, "LlamaModel has no language modelling head.*Pass the whole causal language model"),
        (nn.Linear(2, 2), "Linear has no config"),
    ):
        with pytest.raises(UnsupportedModelError, match=text):
            BlendCache(given, store)
        with pytest.raises(UnsupportedModelError, match=text):
            store.add(given, None, CHUNKS)


def generate(model: nn.Module, store: ChunkStore, **settings: Any) -> BlendCache:
    cache = BlendCache(model, store, **settings)
    inputs = cache.inputs(None, prefix=[5, 6], chunks=CHUNKS, question=[7, 8, 9])
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    return cache


def test_nothing_is_stored_if_the_model_changes_while_a_chunk_is_computed(model, monkeypatch):
    from hf_blend.model import canary

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


def test_chunks_of_a_model_in_training_are_those_of_evaluation(tiny_model, untouched):
    model = tiny_model("llama", num_hidden_layers=2, attention_dropout=0.5)
    store, clean = ChunkStore.open("memory://"), ChunkStore.open("memory://")
    clean.add(model, None, CHUNKS)
    model.train()
    model.lm_head.eval()
    keys = store.add(model, None, CHUNKS)
    assert model.training
    assert model.model.layers[0].self_attn.training
    assert not model.lm_head.training
    for key in keys:
        for (keys_, values), (k, v) in zip(store.get(key).layers, clean.get(key).layers, strict=True):
            assert torch.equal(keys_, k)
            assert torch.equal(values, v)


def test_an_exception_while_a_chunk_is_computed_leaves_training_mode_on(model, monkeypatch):
    model.train()
    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ChunkStore.open("memory://").add(model, None, CHUNKS)
    assert all(module.training for module in model.modules())


def test_chunks_are_computed_without_autocast_and_requests_under_it_are_refused(model):
    store, clean = ChunkStore.open("memory://"), ChunkStore.open("memory://")
    clean.add(model, None, CHUNKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys = store.add(model, None, CHUNKS)
        BlendCache(model, store)  # the self-test is not misled
        with pytest.raises(ConfigError, match=r"autocast is on \(bfloat16 on cpu\).*Leave the autocast block"):
            generate(model, store)
        assert torch.is_autocast_enabled("cpu")
    assert len(store) == len(CHUNKS), "the prefix was neither computed nor stored"
    for key in keys:
        assert torch.equal(store.get(key).layers[1][0], clean.get(key).layers[1][0])


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
        self.synchronised += function.overloadpacket in (
            torch.ops.aten.item,
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
        )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_second_look_synchronises_once_and_reads_no_weight(sampled, model, monkeypatch):
    monkeypatch.setattr(watch, "WHOLE_BYTES", 0 if sampled else watch.WHOLE_BYTES)
    model.model.embed_tokens.to(torch.bfloat16)
    before = fingerprint(model)
    monkeypatch.setattr(weights, "checksum", lambda _: pytest.fail("a weight was read"))
    with Counted() as counted:
        assert fingerprint(model) == before
    assert counted.synchronised == 1


def test_a_sample_reads_the_last_element_and_of_the_first_ones_of_every_tensor(model, monkeypatch):
    monkeypatch.setattr(watch, "WHOLE_BYTES", 0)
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
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
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

    class Other(torch.overrides.TorchFunctionMode):  # no attribute of the model, and no code in a file
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            return found * 1.5 if function is nn.functional.silu else found

    twin = copy.deepcopy(model)
    with observer(Other()):  # a lie: it is refused otherwise
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
    run = adapted if call == "forward" else functools.partial(adapted.generate, max_new_tokens=2, do_sample=False)
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
    assert not Structure(model).is_foreign
    for _ in range(2):
        model.generate(IDS, max_new_tokens=3, do_sample=False)
        assert fingerprint(model) == before
    assert state_of(model) <= state + 1, "hooks that transformers keeps in a model may be looked at once"
    with contextlib.suppress(ValueError):  # some know one attention only
        model.set_attn_implementation("eager")
    assert fingerprint(model) == before


def test_what_has_the_address_of_what_it_replaced_is_another(model):
    layer = model.model.layers[0]
    layer.change = functools.partial(torch.add, other=1)
    before, address, others = structure_digest(model), id(layer.change), []
    del layer.change
    while id(other := functools.partial(torch.add, other=2)) != address and len(others) < 100_000:
        others.append(other)
    assert id(other) == address
    layer.change = other
    assert structure_digest(model) != before
