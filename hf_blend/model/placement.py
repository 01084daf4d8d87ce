# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Where the weights of a model are: on its devices, or where accelerate fetches them from for each call."""

from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError


def offload_hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks that accelerate put around a module's forward; empty without any."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else (hook, *getattr(hook, "hooks", ()))


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its ids: where its embeddings are, or are brought for a call."""
    table = model.get_input_embeddings()
    if not table.weight.is_meta:
        return table.weight.device
    for hook in offload_hooks(table):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    raise UnsupportedModelError(
        f"the input embeddings of {type(model).__name__} are on the meta device and no offload hook holds their "
        "values, so it cannot be run. Load the weights first."
    )
