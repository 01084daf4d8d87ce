# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a method promises: an answer to each sample, what it cost, and its logits over a given answer.

A selector of `hf_blend.selectors` is a method by its own name, see `Blending`; files in this folder are the others.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.model.anatomy import cache_argument, input_device
from hf_blend.prompt.pieces import Prompt, batch, front_ids

from ..answering import AnswerStreamer, ends_of, token_bytes
from ..tasks.base import Sample


@dataclass(frozen=True)
class Outcome:
    """One answer."""

    text: str
    ids: tuple[int, ...]
    ttft_ms: float | None
    charged_budget: float
    prompt_tokens: int
    reused_tokens: int = 0
    computed_chunks: int = 0
    loaded_chunks: int = 0
    read_bytes: int = 0
    logits: Tensor | None = None


class EvalMethod(ABC):
    """Answers samples with one model."""

    answers_together: ClassVar[bool] = True  # several samples side by side

    def __init__(self, model: nn.Module, tokenizer: Any, store: ChunkStore, max_new_tokens: int) -> None:
        self.model, self.tokenizer, self.store, self.max_new_tokens = model, tokenizer, store, max_new_tokens

    @abstractmethod
    def answer(self, samples: Sequence[Sample], targets: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Answer samples side by side, greedily."""

    def warm(self, samples: Sequence[Sample]) -> None:  # noqa: B027
        """Keep what this method would keep of these samples if it had seen their chunks before; not timed.

        Chunks in the store are for the caller to warm, since all methods share it.
        """

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers."""
        return token_bytes(self.model)

    def prompt(self, sample: Sample) -> Prompt:
        """The ids of a sample, BOS in front if the tokenizer puts one there."""
        return Prompt.of_pieces((*front_ids(self.tokenizer), *sample.prefix), sample.chunks, sample.question)

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Ids and mask, `[batch, tokens]`, padded on the left, on the model's device."""
        ids, mask = batch([self.prompt(sample) for sample in samples], self._pad)
        device = input_device(self.model)
        return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

    @torch.no_grad()
    def generate(
        self, inputs: dict[str, Tensor], cache: Cache, targets: Sequence[Sequence[int]] | None, started: float
    ) -> list[Outcome]:
        """Generate greedily with a cache, then run the expected answers through the same cache.

        Shapes: inputs `[batch, tokens]`.
        """
        width, streamer = inputs["input_ids"].shape[1], AnswerStreamer(started=started)
        if targets is not None:
            cache.activate_past_recording()  # or windows could not be cropped
        output = self.model.generate(
            **inputs,
            **cache_argument(self.model, cache),
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            streamer=streamer,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=self._pad,
        )
        logits: list[Any] = [None] * len(output.sequences)
        if targets is not None:
            logits = self._forced_logits(inputs, cache, targets, output.logits[0])
        outcomes = []
        for row, ids in enumerate(output.sequences[:, width:].tolist()):
            answer = self._until_end(ids)
            text = self._text(int(inputs["input_ids"][row, -1]), answer)
            tokens = int(inputs["attention_mask"][row].sum())
            outcomes.append(Outcome(text, tuple(answer), streamer.ttft_ms, 1.0, tokens, logits=logits[row]))
        return outcomes

    def _text(self, last: int, ids: list[int]) -> str:
        """What an answer adds to a prompt that ends in a token, a space in front included; blank lines left out."""
        before = self.tokenizer.decode([last], skip_special_tokens=True)
        whole = self.tokenizer.decode([last, *ids], skip_special_tokens=True)
        text = whole.removeprefix(before)
        if not whole.startswith(before):
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return re.sub(r"^\s*\n", "", text).rstrip()

    @property
    def _pad(self) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return next((token for token in (pad, *ends_of(self.model)) if token is not None), 0)

    def _until_end(self, ids: list[int]) -> list[int]:
        """An answer up to its end token; what is behind is padding."""
        stops = [ids.index(end) + 1 for end in ends_of(self.model) if end in ids]
        return ids[: min(stops, default=len(ids))]

    def _forced_logits(
        self, inputs: dict[str, Tensor], cache: Cache, targets: Sequence[Sequence[int]], first: Tensor
    ) -> list[Tensor]:
        """Logits of each forced answer's tokens: the first ones are known, the others take one more forward."""
        width = inputs["input_ids"].shape[1]
        most = max(len(ids) for ids in targets)
        cache.crop(width - cache.get_seq_length())
        padded = torch.tensor([[*ids, *[0] * (most - len(ids))] for ids in targets], device=first.device)
        parts = [first.float()[:, None]]
        if most > 1:
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(padded[:, :-1])], dim=1)
            positions = (mask.cumsum(-1) - 1)[:, width:]
            arguments = {"attention_mask": mask, "position_ids": positions, **cache_argument(self.model, cache)}
            parts.append(self.model(padded[:, :-1], **arguments, use_cache=True).logits.float())
        return [row[: len(ids)] for row, ids in zip(torch.cat(parts, dim=1), targets, strict=True)]


class Blended(EvalMethod):
    """Generation with a `BlendCache`; a method derives from it and gives its config."""

    config: BlendConfig

    def answer(self, samples: Sequence[Sample], targets: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Reuse the chunks and recompute what the config says."""
        started = time.perf_counter()
        cache = BlendCache(self.model, self.store, self.config)
        prompts = [self.prompt(sample) for sample in samples]
        inputs = cache.inputs(
            self.tokenizer,
            prefix=[prompt.prefix for prompt in prompts],
            chunks=[prompt.chunks for prompt in prompts],
            question=[prompt.question for prompt in prompts],
        )
        outcomes = self.generate(inputs, cache, targets, started)
        report = cache.report
        count = len(samples)  # the figures of a batch are shared out evenly
        reused = (report.reusable_tokens + report.exact_tokens) // count
        read_bytes = reused * self.token_bytes
        if report.partial:
            read_bytes = int(report.partial["loaded_bytes"])
        figures: dict[str, Any] = {
            "charged_budget": report.charged_budget,
            "reused_tokens": reused,
            "read_bytes": read_bytes,
            "computed_chunks": report.computed_chunks // count,
            "loaded_chunks": report.loaded_chunks // count,
        }
        return [replace(outcome, **figures) for outcome in outcomes]
