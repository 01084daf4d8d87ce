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
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.model.cache_keyword import cache_argument
from hf_blend.model.placement import input_device
from hf_blend.prompt.pieces import Prompt, batch
from hf_blend.prompt.tokenizer import front_ids

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
    batch_ttft_ms: float | None = None


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
        return Prompt((*front_ids(self.tokenizer), *sample.prefix), sample.chunks, sample.question)

    def inputs(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Ids and mask, `[batch, tokens]`, padded on the left, on the model's device."""
        made, device = batch([self.prompt(sample) for sample in samples], self._pad), input_device(self.model)
        return {"input_ids": made.input_ids.to(device), "attention_mask": made.attention_mask.to(device)}

    @torch.no_grad()
    def generate(
        self, inputs: dict[str, Tensor], cache: Cache, targets: Sequence[Sequence[int]] | None, started: float
    ) -> list[Outcome]:
        """Generate greedily with a cache, then run the wanted answers through the same cache.

        Shapes: inputs `[batch, tokens]`.
        """
        width, streamer = inputs["input_ids"].shape[1], AnswerStreamer(started=started)
        if targets is not None:
            cache.activate_past_recording()  # or windows could not be cropped
        made = self.model.generate(
            **inputs, **cache_argument(self.model, cache), do_sample=False, max_new_tokens=self.max_new_tokens,
            streamer=streamer, output_logits=True, return_dict_in_generate=True, pad_token_id=self._pad,
        )  # fmt: skip
        logits: list[Any] = [None] * width
        if targets is not None:
            logits = self._over(inputs, cache, targets, made.logits[0])
        outcomes = []
        for row, ids in enumerate(made.sequences[:, width:].tolist()):
            own = self._until_end(ids)
            text = self._text(int(inputs["input_ids"][row, -1]), own)
            tokens = int(inputs["attention_mask"][row].sum())
            time_ms = streamer.ttft_ms if len(made.sequences) == 1 else None
            outcome = Outcome(text, tuple(own), time_ms, 1.0, tokens, logits=logits[row])
            outcomes.append(replace(outcome, batch_ttft_ms=streamer.ttft_ms))
        return outcomes

    def _text(self, last: int, ids: list[int]) -> str:
        """What an answer adds to a prompt that ends in a token, a space in front included; blank lines left out."""
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        before, whole = decode([last]), decode([last, *ids])
        text = whole.removeprefix(before)
        if not whole.startswith(before):
            text = decode(ids)
        return re.sub(r"^\s*\n", "", text).rstrip()

    @property
    def _pad(self) -> int:
        pad, ends = getattr(self.tokenizer, "pad_token_id", None), ends_of(self.model)
        return pad if pad is not None else ends[0] if ends else 0

    def _until_end(self, ids: list[int]) -> list[int]:
        """An answer up to its end token; what stands behind is padding."""
        places = [ids.index(end) + 1 for end in ends_of(self.model) if end in ids]
        return ids[: min(places, default=len(ids))]

    def _over(
        self, inputs: dict[str, Tensor], cache: Cache, targets: Sequence[Sequence[int]], first: Tensor
    ) -> list[Tensor]:
        """Logits of each wanted answer's tokens: the first ones are known, the others take one more forward."""
        width, most = inputs["input_ids"].shape[1], max(map(len, targets))
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
        cache = BlendCache(self.model, self.keeper(), self.config)
        prompts = [self.prompt(sample) for sample in samples]
        pieces: dict[str, Any] = {
            name: [getattr(prompt, name) for prompt in prompts] for name in ("prefix", "chunks", "question")
        }
        outcomes = self.generate(cache.inputs(self.tokenizer, **pieces), cache, targets, started)
        report, count = cache.report, len(samples)  # the figures of a batch are shared out evenly
        reused = (report.reusable_tokens + report.exact_tokens) // count
        figures: dict[str, Any] = {
            "charged_budget": report.charged_budget,
            "reused_tokens": reused,
            "read_bytes": int(report.partial["loaded_bytes"]) if report.partial else reused * self.token_bytes,
            "computed_chunks": report.computed_chunks // count,
            "loaded_chunks": report.loaded_chunks // count,
        }
        return [replace(prompt, **figures) for prompt in outcomes]

    def keeper(self) -> Any:
        """The store that the cache reads; a method may put something in front of it."""
        return self.store
