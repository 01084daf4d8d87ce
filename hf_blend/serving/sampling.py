# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Sampling by the settings of each request, inside the engine's steps.

Of transformers' processors only temperature, top-k and top-p can differ between the requests of a step, and a draw
depends on the other rows. Here each row goes through the processors of `generate`, made for its request, and is drawn
by a generator of its own, so that an equal seed gives an equal text. A greedy row without settings costs an argmax.
"""

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)

from .structured import Follows
from .wire import Generation

__all__ = ["DEFAULTS", "NotNumbers", "Sampling", "TokenLogprob", "Watch", "add_sampling", "greedy", "make_sampling"]

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of a model's generation_config
LEAST_LOGPROB = -9999.0  # as OpenAI's: JSON has no infinity
LEAST_TEMPERATURE = 1e-5  # below it the likeliest token is drawn, and a division would not be finite


class NotNumbers(ArithmeticError):
    """Logits of a step from which no token can be drawn, and the rows where they are."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__("the model's logits are not finite")
        self.rows = rows


class Watch:
    """The first logits processor: it notes rows that are not finite."""

    supports_continuous_batching = True

    def __init__(self) -> None:
        self._odd: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set these rows of `[tokens, vocabulary]` logits to 0, so that the step does not fail here."""
        self._odd = ~scores.amax(dim=1).isfinite()
        return scores.masked_fill_(self._odd[:, None], 0.0)

    def check(self, count: int) -> None:
        """Raise `NotNumbers` if one of the first `count` rows of the last step was not finite."""
        odd, self._odd = self._odd, None
        rows = [] if odd is None else odd[:count].nonzero()[:, 0].tolist()
        if rows:
            raise NotNumbers(rows)


class TokenLogprob(NamedTuple):
    """The log probability of a token, before any processor, and the likeliest tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class Sampling:
    """How the tokens of an answer are drawn: by seed and index, so that a step that is repeated draws the same."""

    prompt_tokens: int
    processors: LogitsProcessorList
    is_greedy: bool
    seed: str
    top_logprobs: int | None = None
    grammar: Follows | None = None
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by the token's index in the answer

    def __deepcopy__(self, memo: Any) -> "Sampling":
        return self  # the engine copies a request that it computes again

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is taken, without processors or log probabilities."""
        return self.is_greedy and not self.processors and self.top_logprobs is None

    @property
    def error(self) -> str:
        """Why the grammar could not be followed to the end; empty if it was."""
        return self.grammar.error if self.grammar else ""

    def draw(self, ids: Sequence[int], logits: Tensor) -> Tensor:
        """Draw the token that follows `ids`, of prompt and answer, from `[1, vocabulary]` logits; returns `[1]`."""
        index, scores = len(ids) - self.prompt_tokens, logits
        if self.processors:
            scores = self.processors(torch.tensor([ids], device=logits.device), logits.clone())
        if self.is_greedy:
            chosen = scores.argmax(dim=1)
        else:
            sums = scores.double().softmax(dim=1).cumsum(dim=1)
            drawn = random.Random(f"{self.seed}/{index}").random() * (1 - 1e-12)
            chosen = torch.searchsorted(sums, sums[:, -1:] * drawn, right=True)[:, 0].clamp_max(sums.shape[1] - 1)
        if self.top_logprobs is not None:
            own = logits.float().log_softmax(dim=1)[0].clamp_min(LEAST_LOGPROB)
            values, tokens = own.topk(min(self.top_logprobs, len(own)))
            top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            self.logprobs[index] = TokenLogprob(float(own[chosen]), top)
        return chosen


def make_sampling(
    generation: Generation, defaults: Mapping[str, Any], prompt_tokens: int, number: int, grammar: Follows | None
) -> Sampling:
    """Return how answer `number` of a request is drawn; `defaults` are for what the request leaves out."""

    def setting(name: str, neutral: float) -> Any:
        own = getattr(generation, name)
        return defaults.get(name, neutral) if own is None else own

    processors: list[LogitsProcessor] = []
    if (penalty := setting("repetition_penalty", 1.0)) != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
    if generation.presence_penalty or generation.frequency_penalty:
        processors.append(Repeats(prompt_tokens, generation.presence_penalty, generation.frequency_penalty))
    if biases := generation.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in biases.items()]))
    processors += [grammar] if grammar else []
    temperature = float(setting("temperature", 1.0))
    is_greedy = temperature < LEAST_TEMPERATURE
    if not is_greedy:
        top_k, top_p, min_p = setting("top_k", 0), float(setting("top_p", 1.0)), float(setting("min_p", 0.0))
        processors += [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
        processors += [TopKLogitsWarper(top_k)] if top_k > 0 else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
        processors += [MinPLogitsWarper(min_p)] if min_p > 0 else []
    seed = secrets.randbits(64) if generation.seed is None else generation.seed
    return Sampling(
        prompt_tokens, LogitsProcessorList(processors), is_greedy, f"{seed}/{number}", generation.alternatives, grammar
    )


class Repeats(LogitsProcessor):
    """Presence and frequency penalties: subtract one for a token that the answer has, the other for each time."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self._prompt_tokens, self._presence, self._frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[1, tokens]` ids of prompt and answer, `[1, vocabulary]` logits."""
        counts = torch.bincount(input_ids[0, self._prompt_tokens :], minlength=scores.shape[1])
        return scores - self._presence * (counts > 0) - self._frequency * counts


class _Draws(ContinuousBatchingLogitsProcessor):
    """The last logits processor: it draws, and returns a 1 for the drawn token, which the greedy engine takes."""

    def __init__(self) -> None:
        self.supported_kwargs, self.ignored_kwargs = {"sampling": Sampling}, ()
        self._rows: list[Any] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Nothing is in the engine's tensor of arguments."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Note the requests of a step, in the order of its rows."""
        self._rows = [request.state for request in requests_with_new_token]
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`[tokens, vocabulary]` logits."""
        chosen = scores.argmax(dim=1)
        for row, state in enumerate(self._rows):
            sampling = state.logit_processor_kwargs.get("sampling")
            if sampling is not None and not sampling.is_plain:
                ids = [*state.initial_tokens, *state.generated_tokens]
                chosen[row : row + 1] = sampling.draw(ids, scores[row : row + 1])
        return torch.zeros_like(scores).scatter_(1, chosen[:, None], 1.0)


def greedy(model: Any, max_new_tokens: int) -> GenerationConfig:
    """Return the settings of an engine that takes the tokens which `add_sampling` draws."""
    own = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
    return GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **own)


def add_sampling(processors: ContinuousBatchingLogitsProcessorList) -> None:
    """Let requests have a setting `sampling`, a `Sampling`."""
    processors.logits_processor.append(_Draws())
    processors.tensors_required += 1
    processors._retrieve_processors_kwargs()
    processors.do_processing = True
