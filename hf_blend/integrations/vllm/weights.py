# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model of transformers over the weights that vLLM holds.

vLLM keeps q, k and v in one tensor, and gate and up in another: those of transformers are rows of it. So each
parameter of the one is a view of one of the other, and nothing is held twice. Who the model is, its fingerprint, is
read from these same bytes: a store that transformers has filled is found.
"""

from collections.abc import Mapping, Set
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...errors import UnsupportedModelError

__all__ = ["FastLinear", "load_copy", "model_over", "speed_up"]


def fast_linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer by oneDNN in float32 on a CPU: what torch takes there, MKL, is slow on some of them."""
    if states.device.type != "cpu" or states.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return torch.nn.functional.linear(states, weight, bias)
    done: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return done


class FastLinear(TorchFunctionMode):
    """Computes linear layers as vLLM does: by oneDNN on a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return fast_linear(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def speed_up(vllm_model: nn.Module) -> None:
    """Let vLLM's layers that keep their weights for this connector use the kernel that they would have packed for."""
    for module in vllm_model.modules():
        if getattr(module, "cpu_linear", None) is torch.nn.functional.linear:
            module.cpu_linear = fast_linear


def model_over(vllm_model: nn.Module, model_config: Any) -> nn.Module:
    """Make a model of transformers whose parameters are views of vLLM's."""
    config = AutoConfig.from_pretrained(model_config.model, revision=model_config.revision)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=model_config.dtype, attn_implementation="sdpa")
    model.tie_weights()
    tensors = dict(vllm_model.named_parameters())
    packed = getattr(vllm_model, "packed_modules_mapping", None) or {}
    tables = [name for name, module in vllm_model.named_modules() if isinstance(module, VocabParallelEmbedding)]
    padded = {f"{name}.weight" for name in tables}  # with rows that no token has
    shapes = {name: own.shape for name, own in model.named_parameters()}
    for name, shape in shapes.items():
        weight = _found(name, shapes, tensors, packed, padded)
        if weight is None or weight.shape != shape or weight.dtype != model.dtype:
            _refuse(model, name, shape, weight)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
    model.tie_weights()
    device = next(model.parameters()).device
    return model.to(device).eval()  # moves the rotary tables, which are no parameters


def load_copy(model_config: Any, device: torch.device) -> nn.Module:
    """Load a second copy of the weights, where vLLM's cannot be read."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_config.model, revision=model_config.revision, dtype=model_config.dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def _found(
    name: str,
    shapes: Mapping[str, torch.Size],
    tensors: Mapping[str, Tensor],
    packed: Mapping[str, list[str]],
    padded: Set[str],
) -> Tensor | None:
    """The part of vLLM's tensors that is a parameter of transformers, if it is there."""
    shape = shapes[name]
    if name in tensors:
        weight = tensors[name].detach()
        return weight[: shape[0]] if name in padded else weight
    module, _, kind = name.rpartition(".")
    owner, _, leaf = module.rpartition(".")
    for fused, parts in packed.items():
        tensor = tensors.get(f"{owner}.{fused}.{kind}")
        if leaf in parts and tensor is not None:
            rows = [shapes.get(f"{owner}.{piece}.{kind}", (0,))[0] for piece in parts]
            start = sum(rows[: parts.index(leaf)])
            return tensor.detach()[start : start + shape[0]] if tensor.shape[0] == sum(rows) else tensor
    return None


def _refuse(model: nn.Module, name: str, shape: torch.Size, weight: Tensor | None) -> None:
    got = "none" if weight is None else f"{weight.dtype} of {tuple(weight.shape)}"
    raise UnsupportedModelError(
        f"vLLM holds {got} for {name} of {type(model).__name__}, expected {model.dtype} of {tuple(shape)}: it is "
        "quantised, packed or of another form. Set allow_copy in kv_connector_extra_config to load the model "
        "a second time; on a CPU see that the plugin hf_blend is not left out of VLLM_PLUGINS."
    )
