# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Quantised models that quantise all tokens of a call by one scale."""

import torch
from torch import Tensor, nn

from .anatomy import decoder_layers
from .placement import input_device


@torch.no_grad()
def shared_scale(model: nn.Module) -> str:
    """Say which projection of a model gives a token another result beside a larger one."""
    for name, module in decoder_layers(model)[0].named_modules():
        width = getattr(module, "in_features", None)
        if isinstance(width, int):
            alone, beside = _beside(module, width, input_device(model), model.dtype)
            if (beside - alone).norm() > 0.1 * alone.norm():
                kind = f"{type(module).__module__}.{type(module).__qualname__}"
                return (
                    f"{name} ({kind}) quantises all tokens of a call by one scale, so what it gives for "
                    "a token depends on those beside it. Quantise weights alone, or each token by itself."
                )
    return ""


def _beside(module: nn.Module, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a projection gives for a random token, alone and beside one that is a hundred times as large."""
    draw = torch.Generator().manual_seed(0)
    tokens = (torch.randn(2, width, generator=draw) * torch.tensor([[1.0], [100.0]])).to(device, dtype)
    try:
        return module(tokens[:1]).float(), module(tokens)[:1].float()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # it reads more, or something else
        return torch.zeros(1), torch.zeros(1)
