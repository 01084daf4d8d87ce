# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model of transformers over the weights that vLLM holds.

vLLM keeps q, k and v in one tensor, and gate and up in another: those of transformers are rows of it. So each
parameter of the one is a view of one of the other, and nothing is held twice. Who the model is, its fingerprint, is
read from these same bytes: a store that transformers has filled is found.
"""

from collections.abc import Mapping
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
    output: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return output


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

    # Set each parameter to a view
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    fused = FusedTensors(vllm_model, shapes)
    for name, shape in shapes.items():
        weight = fused.view(name)
        if weight is None or weight.shape != shape or weight.dtype != model.dtype:
            _refuse(model, name, shape, weight)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
    model.tie_weights()

    # Move the rotary tables, which are no parameters
    device = next(model.parameters()).device
    return model.to(device).eval()


def load_copy(model_config: Any, device: torch.device) -> nn.Module:
    """Load a second copy of the weights, where vLLM's cannot be read."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        model_config.model, revision=model_config.revision, dtype=model_config.dtype, attn_implementation="sdpa"
    )
    return model.to(device).eval()


class FusedTensors:
    """The tensors of a model of vLLM, of which parameters of transformers are rows.

    `shapes` are those of transformers' parameters, by name.
    """

    def __init__(self, vllm_model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes
        self._tensors = {name: parameter.detach() for name, parameter in vllm_model.named_parameters()}
        # Such as {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        self._packed: Mapping[str, list[str]] = getattr(vllm_model, "packed_modules_mapping", None) or {}
        self._padded = set()  # with rows that no token has
        for name, module in vllm_model.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                self._padded.add(f"{name}.weight")

    def view(self, name: str) -> Tensor | None:
        """Give the rows that are a parameter of transformers; None if vLLM has no tensor of this name.

        A tensor of another form is given whole: its shape says so.
        """
        if name in self._tensors:
            tensor = self._tensors[name]
            return tensor[: self._shapes[name][0]] if name in self._padded else tensor
        module, _, kind = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        for fused, parts in self._packed.items():
            tensor_name = f"{parent}.{fused}.{kind}"
            if part in parts and tensor_name in self._tensors:
                siblings = [f"{parent}.{sibling}.{kind}" for sibling in parts]
                return self._rows(self._tensors[tensor_name], siblings, name)
        return None

    def _rows(self, tensor: Tensor, siblings: list[str], name: str) -> Tensor:
        """Give the rows of one of the parameters that lie in a tensor one after the other."""
        start = 0
        stops = {}
        for sibling in siblings:
            if sibling in self._shapes:
                start += self._shapes[sibling][0]
            stops[sibling] = start
        if tensor.shape[0] != start:
            return tensor
        stop = stops[name]
        return tensor[stop - self._shapes[name][0] : stop]


def _refuse(model: nn.Module, name: str, shape: torch.Size, weight: Tensor | None) -> None:
    got = "none" if weight is None else f"{weight.dtype} of {tuple(weight.shape)}"
    raise UnsupportedModelError(
        f"vLLM holds {got} for {name} of {type(model).__name__}, expected {model.dtype} of {tuple(shape)}: it is "
        "quantised, packed or of another form. Set allow_copy in kv_connector_extra_config to load the model "
        "a second time; on a CPU see that the plugin hf_blend is not left out of VLLM_PLUGINS."
    )
