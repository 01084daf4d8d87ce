# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Recompute the tokens that a linear probe of the stored values expects to change most: nothing is computed first.

What a token lacks when its chunk is computed alone often shows in the token itself: "that animal" with no animal
before it, "she" with no name. A probe reads it off the stored values of a few layers, which do not depend on the
position, and predicts the deviation that `oracle` would see. It is fitted for one model by
`benchmarks/fitting.py`, from a few prompts, by ridge regression. Unlike `kv-deviation` it needs no layer
computed in full, and unlike `query-attention` it does not know the question.

Source: ours. The target is CacheBlend's (arXiv 2405.16444), predicted instead of measured.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from .base import Selector, TokenView

PREFIX = "values."


class Learned(Selector):
    """The prediction of a fitted probe. Option `path`: its file, which must be given."""

    needs_kv = False
    defaults: ClassVar[Mapping[str, Any]] = {"path": ""}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """See `Selector`.

        Raises:
            ConfigError: no probe is named, or there is no such option.
        """
        super().__init__(options, seed)
        if not self.options["path"]:
            raise ConfigError(
                f"Learned has path={self.options['path']!r}, expected the file of a probe. Fit one for the model with "
                "python benchmarks/fitting.py; the rule that needs no probe is the selector value-norm."
            )

    def score(self, view: TokenView) -> Tensor:
        """Predicted deviation, `[batch, tokens]`."""
        path = str(self.options["path"])
        weights = probe(path)
        if max(weights) >= view.num_layers:
            raise ConfigError(
                f"the probe {path!r} reads layer {max(weights)}, expected at most {view.num_layers - 1}: it was "
                "fitted for another model. Fit one for this model."
            )
        parts = [self._read(view.stored_alone(layer)[1], weight) for layer, weight in weights.items()]
        return torch.stack(parts).sum(dim=0)

    def _read(self, values: Tensor, weight: Tensor) -> Tensor:
        """Weighted sum over heads and width of `[batch, kv_heads, tokens, width]`: `[batch, tokens]`."""
        if weight.shape != (values.shape[1], values.shape[3]):
            raise ConfigError(
                f"the probe {self.options['path']!r} reads values of {tuple(weight.shape)} (heads, width), expected "
                f"{(values.shape[1], values.shape[3])}: it was fitted for another model. Fit one for this model."
            )
        return torch.einsum("bhtd,hd->bt", values.float(), weight.to(values.device))


def probe(path: str) -> dict[int, Tensor]:
    """Read a fitted probe; again only where the file has changed.

    Args:
        path: of a safetensors file.

    Returns:
        Layer → `[kv_heads, head_dim]` float32.

    Raises:
        ConfigError: there is no such file, or it holds no probe.
    """
    try:
        state = Path(path).expanduser().stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return _read_probe(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=8)
def _read_probe(path: str, *state: int) -> dict[int, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(Path(path).expanduser())
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error
    layers = {name: name.removeprefix(PREFIX) for name in tensors}
    if not tensors or not all(name.startswith(PREFIX) and layer.isdecimal() for name, layer in layers.items()):
        raise ConfigError(f"the file {path!r} holds {sorted(tensors)}, expected weights named {PREFIX}<layer>.")
    if not all(weight.isfinite().all() for weight in tensors.values()):
        raise ConfigError(f"the probe {path!r} holds NaN or infinity, expected numbers. Fit it again.")
    return {int(layer): tensors[name].float() for name, layer in layers.items()}


def _unreadable(path: str, error: Exception) -> ConfigError:
    return ConfigError(f"the probe {path!r} cannot be read: {error}. Expected a file of benchmarks/fitting.py.")
