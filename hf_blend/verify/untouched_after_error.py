# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An exception inside a layer leaves the model as it was, and the cache ready for another try with the same result."""

import torch
from torch import nn

from ..cache.blend_cache import BlendCache
from ..model.anatomy import decoder_layers
from .base import Check, Outcome, violations
from .floor import distance
from .subject import ModelUnderTest
from .traces import differences, hooks_of, traces

RATIO = 0.3


class _Burst(Exception):
    """The exception that passes through."""


class UntouchedAfterError(Check):
    """It is raised in the attention of each layer in turn."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of things that differ; 0 is allowed."""
        wanted = subject.blend(subject.prompts, RATIO).asked
        before, wrong = traces(subject), []
        for index, layer in enumerate(decoder_layers(subject.model)):
            cache = subject.cache(RATIO)
            wrong += _burst(subject, cache, layer, index)
            wrong += [f"{name} after an error in layer {index}" for name in differences(before, traces(subject))]
            error = distance(subject.prefill(cache, subject.prompts), wanted)
            if error:
                wrong.append(f"the second try after an error in layer {index} is off by {error:.2g}")
        return violations(wrong)


def _burst(subject: ModelUnderTest, cache: BlendCache, layer: nn.Module, index: int) -> list[str]:
    """Run a request into an exception; gives back what was wrong on the way."""
    hooks: list[int] = []

    def burst(*_: object) -> None:
        hooks.append(hooks_of(subject.model))
        raise _Burst

    inner = next((child for name, child in layer.named_children() if "att" in name), next(layer.children()))
    handle = inner.register_forward_hook(burst)
    try:
        with torch.no_grad():
            subject.prefill(cache, subject.prompts)
    except _Burst:
        return [] if hooks[0] > 1 else [f"layer {index} was not entered, so nothing was shown"]
    finally:
        handle.remove()
    return [f"layer {index} swallowed the exception"]
