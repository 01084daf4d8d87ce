# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Ways in which a model changes after its chunks were stored, for `tests/test_identity.py`; adapters are there.

They are those of training, steering, serving and research: none is a trick that no user plays, and most go round
everything that torch counts.
"""

import random
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from hf_blend.model.fingerprint import fingerprint

Change = Callable[[Any, random.Random], object]
IDS = torch.tensor([[5, 9, 23, 77, 41, 12, 8, 60]])


def _weight(model: Any, draw: random.Random) -> Tensor:
    """A matrix that the KV of some layer depends on."""
    layers = model.model.layers
    later, last = draw.choice(layers[:-1]), layers[-1]
    inner = [later.mlp.down_proj, later.self_attn.v_proj, later.self_attn.o_proj]
    return draw.choice([*inner, last.self_attn.k_proj, last.self_attn.v_proj, model.model.embed_tokens]).weight


def _mlp(model: Any, draw: random.Random) -> Any:
    return draw.choice(model.model.layers[:-1]).mlp


def _train(model: Any, make: Callable[[list[Tensor]], torch.optim.Optimizer], frozen: int = 0) -> None:
    """One step of an optimizer, all that is frozen left out."""
    fixed = [model.model.embed_tokens, *model.model.layers[:frozen]] if frozen else []
    held = {id(weight) for module in fixed for weight in module.parameters()}
    optimizer = make([weight for weight in model.parameters() if id(weight) not in held])
    with torch.enable_grad():
        model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)


def _data_copied(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)
    weight.data.copy_(torch.randn_like(weight))


def _averaged(model: Any, draw: random.Random) -> None:
    for weight in model.parameters():  # as an exponential moving average is swapped in
        weight.data.lerp_(torch.randn_like(weight), 0.05)


def _merged(model: Any, draw: random.Random) -> None:
    weight = _weight(model, draw)  # a LoRA merged by hand
    weight.data += torch.randn(weight.shape[0], 2) @ torch.randn(2, weight.shape[1]) * 0.05


def _numpy(model: Any, draw: random.Random) -> None:
    _weight(model, draw).detach().numpy()[:] *= 1.1


def _replaced(model: Any, draw: random.Random) -> None:
    layer = draw.choice(model.model.layers)
    layer.self_attn.v_proj.weight = nn.Parameter(layer.self_attn.v_proj.weight.detach() * 1.1)


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


def _scaling(model: Any, draw: random.Random) -> None:
    draw.choice(model.model.layers[:-1]).self_attn.scaling *= 2


def _attention_scaling(model: Any, draw: random.Random) -> None:
    model.model.rotary_emb.attention_scaling *= 1.2


def _forward_of_one(model: Any, draw: random.Random) -> None:
    module = _mlp(model, draw)
    stock = module.forward
    module.forward = lambda hidden: stock(hidden) * 1.2


def _method_of_one(model: Any, draw: random.Random) -> None:
    module = _mlp(model, draw)
    module.forward = MethodType(lambda self, hidden: self.down_proj(self.act_fn(self.gate_proj(hidden))), module)


LASTING: dict[str, Change] = {  # changes that are not undone
    "a fused step of AdamW": lambda model, draw: _train(model, partial(AdamW, lr=0.02, fused=True)),
    "a fused step, first layer frozen": lambda model, draw: _train(model, partial(AdamW, lr=0.05, fused=True), 1),
    "a step of SGD": lambda model, draw: _train(model, partial(SGD, lr=0.1, foreach=True)),
    "a weight scaled through .data": lambda model, draw: _weight(model, draw).data.mul_(1.1),
    "a weight copied through .data": _data_copied,
    "all weights averaged through .data": _averaged,
    "a weight written through numpy": _numpy,
    "an adapter merged by hand": _merged,
    "a weight changed in place": torch.no_grad()(lambda model, draw: _weight(model, draw).mul_(1.1)),
    "a weight replaced": _replaced,
    "a state dict loaded": lambda model, draw: model.load_state_dict(
        {name: weight * 1.02 for name, weight in model.state_dict().items()}
    ),
    "half() and back": lambda model, draw: model.half().float(),
    "a weight of inference mode": _in_inference_mode,
    "two MLPs swapped": _other_layers,
    "other frequencies": lambda model, draw: model.model.rotary_emb.inv_freq.data.mul_(0.9),
    "attention_scaling": _attention_scaling,
    "scaling": _scaling,
    "act_fn": lambda model, draw: setattr(_mlp(model, draw), "act_fn", nn.ReLU()),
    "the epsilon of a norm": lambda model, draw: setattr(
        draw.choice(model.model.layers).input_layernorm, "variance_epsilon", 0.5
    ),
    "is_causal": lambda model, draw: setattr(model.model.layers[draw.randrange(2)].self_attn, "is_causal", False),
    "forward of one module": _forward_of_one,
    "a method bound to one module": _method_of_one,
}
