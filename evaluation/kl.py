# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What blending loses on a prompt: the KL divergence of next-token distributions from full prefill's, and its time.

Full prefill answers greedily; the answer is forced on a blended prefill of the same prompt, so that both are compared
token by token. No right answer is needed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.anatomy import stock_cache
from hf_blend.model.placement import input_device

from .answering import FULL_REUSE, Method, answer, ends_of, ids_of, inputs_of

FORCED_TOKENS = 10  # of full prefill's answer
REUSE = FULL_REUSE.config or BlendConfig(recompute_ratio=0.0, selector="none")


@dataclass(frozen=True)
class Prompt:
    """One prompt of the sample."""

    name: str
    given: dict[str, Any]
    answers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Full:
    """What full prefill says."""

    ids: tuple[int, ...]
    log_probs: Tensor
    ttft_ms: float


@dataclass(frozen=True)
class Loss:
    """What a candidate loses on one prompt."""

    kl: float
    kl_first: float
    charged: float
    ttft_ratio: float


class Measure:
    """Full prefill, and what a candidate loses to it."""

    def __init__(self, model: nn.Module, tokenizer: Any, store: ChunkStore) -> None:
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self._ends = ends_of(model)

    @torch.no_grad()
    def full(self, prompt: Prompt, tokens: int = FORCED_TOKENS) -> Full:
        """Prefill a prompt whole and answer it greedily."""
        started = time.perf_counter()
        ids, cache = self._tensor(ids_of(self.tokenizer, prompt.given)), stock_cache(self.model)
        logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        said, found, ttft_ms = [int(logits.argmax())], [logits], 1e3 * (time.perf_counter() - started)
        while len(said) < tokens and said[-1] not in self._ends:
            found.append(self.model(self._tensor(said[-1:]), past_key_values=cache).logits[0, -1])
            said.append(int(found[-1].argmax()))
        return Full(tuple(said), torch.stack(found[:FORCED_TOKENS]).double().log_softmax(-1), ttft_ms)

    def store_chunks(self, prompt: Prompt, config: BlendConfig) -> None:
        """Compute the chunks of a prompt that the store lacks, as a config captures them; not timed."""
        self._blended(
            prompt, replace(REUSE, chunk_prefix_ids=config.chunk_prefix_ids, allow_unverified=config.allow_unverified)
        )

    @torch.no_grad()
    def loss(self, prompt: Prompt, full: Full, config: BlendConfig) -> Loss:
        """Blend a prompt and force full prefill's answer on it."""
        started = time.perf_counter()
        cache, logits = self._blended(prompt, config)
        int(logits.argmax())  # waits for the device
        ttft_ratio = 1e3 * (time.perf_counter() - started) / full.ttft_ms
        report, forced = cache.report, full.ids[: len(full.log_probs) - 1]
        if report.fallback_reason or not report.reusable_tokens:
            why = report.fallback_reason or "no token of it is reusable. Two chunks or more are expected"
            raise PromptError(f"{prompt.name} cannot be blended: {why.rstrip('.')}. Leave it out.")
        if report.computed_chunks:
            raise ConfigError(
                f"the store dropped {report.computed_chunks} chunks of {prompt.name} before they were used again, so "
                "times would be wrong. Give a store on disk with --store, or shorter prompts."
            )
        if forced:
            logits = torch.cat([logits, self.model(self._tensor(forced), past_key_values=cache).logits[0]])
        lost = full.log_probs.exp() * (full.log_probs - logits.double().log_softmax(-1))
        kl = lost.sum(-1).clamp(min=0)
        return Loss(float(kl.mean()), float(kl[0]), report.charged_budget, ttft_ratio)

    def said(self, ids: Sequence[int]) -> str:
        """Return an answer as text."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()

    def answered(self, prompt: Prompt, config: BlendConfig, tokens: int) -> str:
        """Return what a blended prompt is answered with, cut at some tokens."""
        method = Method("blend", config)
        return answer(self.model, self.tokenizer, self.store, method, prompt.given, max_new_tokens=tokens).text

    @torch.no_grad()
    def _blended(self, prompt: Prompt, config: BlendConfig) -> tuple[BlendCache, Tensor]:
        """Prefill a prompt from stored chunks; the logits of its first new token, `[1, vocabulary]`."""
        cache = BlendCache(self.model, self.store, config)
        inputs = inputs_of(cache, self.tokenizer, prompt.given)
        return cache, self.model(**inputs, past_key_values=cache, logits_to_keep=1).logits[0, -1:]

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=input_device(self.model))
