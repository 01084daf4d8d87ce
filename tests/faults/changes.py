# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways in which a model changes after its chunks were stored, for `tests/test_identity.py`.

They are those of training, steering, serving and research: none is a trick that no user plays, and most go round
everything that torch counts.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend.model.fingerprint import fingerprint

Change = Callable[[Any, random.Random], AbstractContextManager[None]]
IDS = torch.tensor([[5, 9, 23, 77, 41, 12, 8, 60]])


def _weight(model: Any, draw: random.Random) -> Tensor:
    """A matrix that the KV of some layer depends on."""
    layers = model.model.layers
    later, last = draw.choice(layers[:-1]), layers[-1]
    inner = [later.mlp.down_proj, later.self_attn.v_proj, later.self_attn.o_proj]
    return draw.choice([*inner, last.self_attn.k_proj, last.self_attn.v_proj, model.model.embed_tokens]).weight


LASTING: dict[str, Change] = {}


def lasting(name: str) -> Callable[[Callable[[Any, random.Random], None]], Any]:
    """Register a change that is not undone."""

    def register(change: Callable[[Any, random.Random], None]) -> Any:
        @contextmanager
        def made(model: Any, draw: random.Random) -> Iterator[None]:
            change(model, draw)
            yield

        LASTING[name] = made
        return change

    return register


def of_adapter(name: str) -> Callable[[Callable[["_Adapter"], None]], Any]:
    """Register a change of the one adapter of a model, which it had before it served."""

    def register(change: Callable[[_Adapter], None]) -> Any:
        found = lambda model: next(module for module in model.modules() if isinstance(module, _Adapter))  # noqa: E731
        return lasting(name)(lambda model, _: change(found(model)))

    return register


def _train(model: Any, make: Callable[[list[Tensor]], torch.optim.Optimizer], frozen: int = 0) -> None:
    """One step of an optimizer, all that is frozen left out."""
    fixed = [model.model.embed_tokens, *model.model.layers[:frozen]] if frozen else []
    held = {id(weight) for module in fixed for weight in module.parameters()}
    optimizer = make([weight for weight in model.parameters() if id(weight) not in held])
    with torch.enable_grad():
        model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)


@lasting("a fused step of AdamW")
def _adamw(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.AdamW(weights, lr=0.02, fused=True))


@lasting("a fused step, first layer frozen")
def _frozen(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.AdamW(weights, lr=0.05, fused=True), frozen=1)


@lasting("a step of SGD")
def _sgd(model: Any, draw: random.Random) -> None:
    _train(model, lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True))


@lasting("a weight scaled through .data")
def _data_scaled(model: Any, draw: random.Random) -> None:
    _weight(model, draw).data.mul_(1.1)


@lasting("a weight copied through .data")
def _data_copied(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)
    weight.data.copy_(torch.randn_like(weight))


@lasting("all weights averaged through .data")
def _averaged(model: Any, draw: random.Random) -> None:
    for weight in model.parameters():  # as an exponential moving average is swapped in
        weight.data.lerp_(torch.randn_like(weight), 0.05)


@lasting("a weight written through numpy")
def _numpy(model: Any, draw: random.Random) -> None:
    _weight(model, draw).detach().numpy()[:] *= 1.1


@lasting("an adapter merged by hand")
def _merged(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)  # a LoRA merged by hand
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1]) * 0.05


@lasting("a weight changed in place")
@torch.no_grad()
def _in_place(model: Any, draw: random.Random) -> None:
    _weight(model, draw).mul_(1.1)


@lasting("a weight replaced")
def _replaced(model: Any, draw: random.Random) -> None:
    layer = draw.choice(model.model.layers)
    layer.self_attn.v_proj.weight = nn.Parameter(layer.self_attn.v_proj.weight.detach() * 1.1)


@lasting("a state dict loaded")
def _loaded(model: Any, draw: random.Random) -> None:
    model.load_state_dict({name: weight * 1.02 for name, weight in model.state_dict().items()})


@lasting("half() and back")
def _half_and_back(model: Any, draw: random.Random) -> None:
    model.half().float()


@lasting("a weight of inference mode")
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


@lasting("two MLPs swapped")
def _other_layers(model: Any, draw: random.Random) -> None:
    one, two = draw.sample(range(len(model.model.layers) - 1), 2)
    layers = model.model.layers
    layers[one].mlp, layers[two].mlp = layers[two].mlp, layers[one].mlp


@lasting("other frequencies")
def _frequencies(model: Any, draw: random.Random) -> None:
    model.model.rotary_emb.inv_freq.data.mul_(0.9)


@lasting("attention_scaling")
def _attention_scaling(model: Any, draw: random.Random) -> None:
    model.model.rotary_emb.attention_scaling *= 1.2


@lasting("scaling")
def _scaling(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).self_attn.scaling *= 2


@lasting("act_fn")
def _activation(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).mlp.act_fn = nn.ReLU()


@lasting("the epsilon of a norm")
def _epsilon(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers).input_layernorm.variance_epsilon = 0.5


@lasting("is_causal")
def _not_causal(model: Any, draw: random.Random) -> None:
    model.model.layers[draw.randrange(2)].self_attn.is_causal = False


@lasting("forward of one module")
def _forward_of_one(model: Any, draw: random.Random) -> None:
    module = draw.choice(model.model.layers[:-1]).mlp
    stock = module.forward
    module.forward = lambda hidden: stock(hidden) * 1.2


@lasting("a method bound to one module")
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


@of_adapter("another adapter")
def _chosen(adapter: _Adapter) -> None:
    adapter.acting = "b"


@of_adapter("an adapter switched off")
def _off(adapter: _Adapter) -> None:
    adapter.acting = ""


@of_adapter("a stronger adapter")
def _stronger(adapter: _Adapter) -> None:
    adapter.strength = 3.0


@of_adapter("a trained adapter")
def _trained_adapter(adapter: _Adapter) -> None:
    weights = [adapter.inner["a"], adapter.outer["a"]]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()


PREPARED: dict[str, Callable[[Any, random.Random], None]] = (
    dict.fromkeys(  # what the model is before it serves and changes
        ("another adapter", "an adapter switched off", "a stronger adapter", "a trained adapter"), _with_adapters
    )
)
