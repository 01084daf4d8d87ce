# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Quantised models: those that quantise all tokens of a call by one scale, and 8-bit ones that log every cast."""

import logging
import weakref

import torch
from torch import Tensor, nn

from .anatomy import decoder_layers
from .fingerprint import per_model
from .placement import input_device

LOGGER = "bitsandbytes.autograd._functions"
REPEATED = "MatMul8bitLt: inputs will be cast"


class _WithoutCasts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(REPEATED)


@per_model
def _has_casts(model: nn.Module) -> bool:
    return any(type(module).__name__ == "Linear8bitLt" for module in model.modules())


def silence_casts(model: nn.Module, owner: object) -> None:
    """Drop the line that bitsandbytes logs per product, as long as an object lives; other lines pass."""
    if _has_casts(model):
        logger, dropping = logging.getLogger(LOGGER), _WithoutCasts()
        logger.addFilter(dropping)
        weakref.finalize(owner, logger.removeFilter, dropping).atexit = False


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
