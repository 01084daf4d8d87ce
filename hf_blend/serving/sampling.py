# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Temperature and top-p of each request, inside the engine's steps; temperature 0 is greedy search.

transformers has such processors, but they divide by the temperature, which 0 breaks, and sort the vocabulary for every
token of every request, whether anybody asked for top-p or not.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

__all__ = ["NotNumbers", "Watch", "add_sampling", "sampled"]


class NotNumbers(ArithmeticError):
    """Logits that no token can be drawn from; which rows of the step they are in."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__("the model's logits are not finite")
        self.rows = rows


class Watch:
    """A logits processor that notes rows without a largest number, before anything else looks at them."""

    supports_continuous_batching = True

    def __init__(self) -> None:
        self._odd: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[tokens, vocabulary]` logits; those rows are 0, so that the step goes through."""
        self._odd = ~scores.amax(dim=1).isfinite()
        return scores.masked_fill_(self._odd[:, None], 0.0)

    def check(self, count: int) -> None:
        """Look at the step that is over."""
        rows = [] if self._odd is None else self._odd[:count].nonzero()[:, 0].tolist()
        self._odd = None
        if rows:
            raise NotNumbers(rows)


class _PerRequest(ContinuousBatchingLogitsProcessor):
    """A number of each request, float32 in the int32 storage of the engine's inputs."""

    name = ""
    default = 1.0
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.supported_kwargs = {self.name: float}

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Write the number of a request that names none."""
        values = torch.full_like(int32_tensor, self.default, dtype=torch.float32)
        int32_tensor.copy_(values.view(torch.int32))

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """The numbers of the requests of a step."""
        given = [one.state.logit_processor_kwargs.get(self.name, self.default) for one in requests_with_new_token]
        return torch.tensor(given, dtype=torch.float32).view(torch.int32)


class Temperature(_PerRequest):
    """Divide the logits by a temperature; where it is 0 leave the highest alone."""

    name, default = "temperature", 0.0

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`[tokens, vocabulary]` logits, changed."""
        values = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        best = torch.full_like(scores, -torch.inf).scatter_(1, scores.argmax(dim=1, keepdim=True), 0.0)
        return torch.where(values > 0, scores / values.clamp_min(1e-6), best)


class TopP(_PerRequest):
    """Leave the likeliest tokens that together have a probability of p."""

    name, default = "top_p", 1.0

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`[tokens, vocabulary]` logits, changed."""
        p = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        rows = (p[:, 0] < 1).nonzero()[:, 0]
        if not len(rows):
            return scores
        ordered, places = scores[rows].sort(dim=1, descending=True)
        before = ordered.softmax(dim=1).cumsum(dim=1) - ordered.softmax(dim=1)
        beyond = before >= p[rows]
        beyond[:, 0] = False  # p may be 0 in float32
        ordered = ordered.masked_fill(beyond, -torch.inf)
        return scores.index_copy(0, rows, torch.empty_like(ordered).scatter_(1, places, ordered))


def sampled(model: Any, max_new_tokens: int) -> GenerationConfig:
    """How an engine decodes whose requests each name their temperature."""
    own = model.generation_config
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=own.eos_token_id,
        bos_token_id=own.bos_token_id,
        pad_token_id=own.pad_token_id,
    )


def add_sampling(processors: ContinuousBatchingLogitsProcessorList) -> None:
    """Let requests name `temperature` and `top_p`."""
    for processor in (Temperature(), TopP()):
        processors.logits_processor.append(processor)
        processors.tensors_required += 1
    processors._retrieve_processors_kwargs()
    processors.do_processing = True
