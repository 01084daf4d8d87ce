# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways in which a live model comes to compute something else, as training, steering, serving and research do them.

Each is a context: some changes last, others are undone when it ends. None changes a model by a trick that no user
plays; most go round everything that torch counts.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend.model.fingerprint import fingerprint

__all__ = ["CHANGES", "LASTING", "PREPARED", "SAME"]

Change = Callable[[Any, random.Random], AbstractContextManager[None]]
IDS = torch.tensor([[5, 9, 23, 77, 41, 12, 8, 60]])


def _weight(model: Any, draw: random.Random) -> Tensor:
    """A matrix that the KV of some layer depends on."""
    layers = model.model.layers
    later, last = draw.choice(layers[:-1]), layers[-1]
    inner = [later.mlp.down_proj, later.self_attn.v_proj, later.self_attn.o_proj]
    return draw.choice([*inner, last.self_attn.k_proj, last.self_attn.v_proj, model.model.embed_tokens]).weight


def _trained(make: Callable[[list[Tensor]], torch.optim.Optimizer], *, frozen: int = 0) -> Change:
    """One step of an optimizer, all that is frozen left out."""

    def change(model: Any, draw: random.Random) -> None:
        del draw
        fixed = [model.model.embed_tokens, *model.model.layers[:frozen]] if frozen else []
        held = {id(weight) for module in fixed for weight in module.parameters()}
        weights = [weight for weight in model.parameters() if id(weight) not in held]
        optimizer = make(weights)
        with torch.enable_grad():
            model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return _lasting(change)


def _lasting(change: Callable[[Any, random.Random], None]) -> Change:
    @contextmanager
    def made(model: Any, draw: random.Random) -> Iterator[None]:
        change(model, draw)
        yield

    return made


def _data_scaled(model: Any, draw: random.Random) -> None:
    _weight(model, draw).data.mul_(1.1)


def _data_copied(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)
    weight.data.copy_(torch.randn_like(weight))


def _averaged(model: Any, draw: random.Random) -> None:
    del draw
    for weight in model.parameters():  # as an exponential moving average is swapped in
        weight.data.lerp_(torch.randn_like(weight), 0.05)


def _numpy(model: Any, draw: random.Random) -> None:
    _weight(model, draw).detach().numpy()[:] *= 1.1


def _merged(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)  # a LoRA merged by hand
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1]) * 0.05


@torch.no_grad()
def _in_place(model: Any, draw: random.Random) -> None:
    _weight(model, draw).mul_(1.1)


def _replaced(model: Any, draw: random.Random) -> None:
    layer = draw.choice(model.model.layers)
    layer.self_attn.v_proj.weight = nn.Parameter(layer.self_attn.v_proj.weight.detach() * 1.1)


def _loaded(model: Any, draw: random.Random) -> None:
    del draw
    model.load_state_dict({name: weight * 1.02 for name, weight in model.state_dict().items()})


def _half_and_back(model: Any, draw: random.Random) -> None:
    del draw
    model.half().float()


def _in_inference_mode(model: Any, draw: random.Random) -> None:
    """Weights that were built there have no version that torch counts."""
    with torch.inference_mode():
        for module in model.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = nn.Parameter(weight.clone(), requires_grad=False)
    fingerprint(model)  # as of a model that has served already
    with torch.inference_mode():
        _weight(model, draw).mul_(1.1)


def _other_layers(model: Any, draw: random.Random) -> None:
    one, two = draw.sample(range(len(model.model.layers) - 1), 2)
    layers = model.model.layers
    layers[one].mlp, layers[two].mlp = layers[two].mlp, layers[one].mlp


def _frequencies(model: Any, draw: random.Random) -> None:
    del draw
    model.model.rotary_emb.inv_freq.data.mul_(0.9)


def _attention_scaling(model: Any, draw: random.Random) -> None:
    del draw
    model.model.rotary_emb.attention_scaling *= 1.2


def _scaling(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).self_attn.scaling *= 2


def _activation(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).mlp.act_fn = nn.ReLU()


def _epsilon(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers).input_layernorm.variance_epsilon = 0.5


def _not_causal(model: Any, draw: random.Random) -> None:
    model.model.layers[draw.randrange(2)].self_attn.is_causal = False


def _forward_of_one(model: Any, draw: random.Random) -> None:
    module = draw.choice(model.model.layers[:-1]).mlp
    stock = module.forward
    module.forward = lambda hidden: stock(hidden) * 1.2


def _method_of_one(model: Any, draw: random.Random) -> None:
    module = draw.choice(model.model.layers[:-1]).mlp

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)))

    module.forward = MethodType(forward, module)


class _Adapter(nn.Module):
    """Low-rank adapters round a projection, one of which acts; which one says a text, how strongly a number."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.acting, self.strength = base, "a", 1.0
        self.inner = nn.ParameterDict({name: torch.randn(base.in_features, 2) * 0.1 for name in "ab"})
        self.outer = nn.ParameterDict({name: torch.randn(2, base.out_features) * 0.1 for name in "ab"})

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.acting:
            return self.base(hidden)
        return self.base(hidden) + self.strength * hidden @ self.inner[self.acting] @ self.outer[self.acting]


def _with_adapters(model: Any, draw: random.Random) -> None:
    attention = draw.choice(model.model.layers).self_attn
    attention.v_proj = _Adapter(attention.v_proj)


def _to_adapter(change: Callable[[_Adapter], None]) -> Change:
    def made(model: Any, draw: random.Random) -> None:
        del draw
        (adapter,) = (module for module in model.modules() if isinstance(module, _Adapter))
        change(adapter)

    return _lasting(made)


def _chosen(adapter: _Adapter) -> None:
    adapter.acting = "b"


def _off(adapter: _Adapter) -> None:
    adapter.acting = ""


def _stronger(adapter: _Adapter) -> None:
    adapter.strength = 3.0


def _trained_adapter(adapter: _Adapter) -> None:
    weights = [adapter.inner["a"], adapter.outer["a"]]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()


@contextmanager
def _hook(model: Any, draw: random.Random) -> Iterator[None]:
    """A hook: something is added behind a layer's MLP."""
    direction = torch.randn(model.config.hidden_size)
    module = draw.choice(model.model.layers[:-1]).mlp
    handle = module.register_forward_hook(lambda module, args, output: output + direction)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _pre_hook(model: Any, draw: random.Random) -> Iterator[None]:
    layer = draw.choice(model.model.layers[:-1])
    handle = layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _global_hook(model: Any, draw: random.Random) -> Iterator[None]:
    module = draw.choice(model.model.layers[:-1]).mlp

    def hook(one: nn.Module, args: Any, output: Any) -> Any:
        return output * 1.3 if one is module else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _class_patched(model: Any, draw: random.Random) -> Iterator[None]:
    del draw
    kind = type(model.model.layers[0].mlp)
    stock = kind.forward
    kind.forward = lambda self, hidden: stock(self, hidden) * 1.2
    try:
        yield
    finally:
        kind.forward = stock


@contextmanager
def _training(model: Any, draw: random.Random) -> Iterator[None]:
    """In train mode, with dropout; sometimes one module alone."""
    module = draw.choice([model, model, model.model.layers[0].self_attn])
    module.train()
    try:
        yield
    finally:
        model.eval()


@contextmanager
def _autocast(model: Any, draw: random.Random) -> Iterator[None]:
    del model, draw
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def _nothing(model: Any, draw: random.Random) -> Iterator[None]:
    del model, draw
    yield


def _gradients(model: Any, draw: random.Random) -> None:
    del draw
    model.requires_grad_(False)


LASTING: dict[str, Change] = {
    "a fused step of AdamW": _trained(lambda weights: torch.optim.AdamW(weights, lr=0.02, fused=True)),
    "a fused step, first layer frozen": _trained(lambda w: torch.optim.AdamW(w, lr=0.05, fused=True), frozen=1),
    "a step of SGD": _trained(lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True)),
    "a weight scaled through .data": _lasting(_data_scaled),
    "a weight copied through .data": _lasting(_data_copied),
    "all weights averaged through .data": _lasting(_averaged),
    "a weight written through numpy": _lasting(_numpy),
    "an adapter merged by hand": _lasting(_merged),
    "a weight changed in place": _lasting(_in_place),
    "a weight replaced": _lasting(_replaced),
    "a state dict loaded": _lasting(_loaded),
    "half() and back": _lasting(_half_and_back),
    "a weight of inference mode": _lasting(_in_inference_mode),
    "two MLPs swapped": _lasting(_other_layers),
    "other frequencies": _lasting(_frequencies),
    "attention_scaling": _lasting(_attention_scaling),
    "scaling": _lasting(_scaling),
    "act_fn": _lasting(_activation),
    "the epsilon of a norm": _lasting(_epsilon),
    "is_causal": _lasting(_not_causal),
    "forward of one module": _lasting(_forward_of_one),
    "a method bound to one module": _lasting(_method_of_one),
    "another adapter": _to_adapter(_chosen),
    "an adapter switched off": _to_adapter(_off),
    "a stronger adapter": _to_adapter(_stronger),
    "a trained adapter": _to_adapter(_trained_adapter),
}
CHANGES: dict[str, Change] = {
    **LASTING,
    "a hook": _hook,
    "a hook before a layer": _pre_hook,
    "a hook on all modules": _global_hook,
    "forward of a class": _class_patched,
    "train mode": _training,
    "autocast": _autocast,
}
PREPARED: dict[str, Callable[[Any, random.Random], None]] = (
    dict.fromkeys(  # what the model is before it serves and changes
        ("another adapter", "an adapter switched off", "a stronger adapter", "a trained adapter"), _with_adapters
    )
)
SAME: dict[str, Change] = {"nothing": _nothing, "requires_grad": _lasting(_gradients)}  # what is stored stays valid
