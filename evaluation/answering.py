# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests in the model's own form of a prompt, and what methods, streams and runs over them have in common."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, StoppingCriteria

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.config import BlendConfig, default_config
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.placement import input_device
from hf_blend.prompt.detokenizer import Detokenizer
from hf_blend.prompt.messages import build_messages, render
from hf_blend.prompt.pieces import Span, build

LOOP_TOKENS, LOOP_TIMES = 12, 4  # an answer that has so many tokens so often, the last time at its end, is a loop
INSTRUCTION = "Answer the question from the documents, in as few words as possible."


@dataclass(frozen=True)
class Turn:
    """A question and its answer, earlier in a conversation, and the documents that came with the question."""

    question: str
    answer: str
    documents: tuple[str, ...] = ()


def build_request(
    tokenizer: Any, chunks: Sequence[Any], question: str, system: str | None, history: Sequence[Turn] = ()
) -> dict[str, Any]:
    """Put a question and its chunks into the model's own form of a prompt: what a cache makes inputs of, by name.

    It has `messages` and `documents` where the tokenizer has a chat template, else `prefix`, `chunks` and `question`.
    The documents of a question are in its own turn, so that a conversation only grows, and a cache keeps it.
    """
    earlier = [text for turn in history for text in turn.documents]
    if not getattr(tokenizer, "chat_template", None):
        said = "".join(f"Question: {turn.question}\nAnswer: {turn.answer}\n" for turn in history)
        question_text = f"{said}Question: {question}\nAnswer:" if history else question
        return {"prefix": system or None, "chunks": [*earlier, *chunks], "question": question_text}
    texts = tuple(chunk if isinstance(chunk, str) else tokenizer.decode(chunk) for chunk in chunks)
    told = INSTRUCTION if system is None else system
    has_system = bool(told) and _has_system_role(tokenizer, told)
    messages = [{"role": "system", "content": told}] if has_system else []
    for number, turn in enumerate((*history, Turn(question, "", texts))):
        read = "".join(turn.documents).rstrip()
        content = f"{read}\n\nQuestion: {turn.question}" if read else turn.question
        is_told = bool(told) and not has_system and not number
        messages.append({"role": "user", "content": f"{told}\n\n{content}" if is_told else content})
        messages.append({"role": "assistant", "content": turn.answer})
    return {"messages": messages[:-1], "documents": [text for text in (*earlier, *texts) if text.strip()]}


def inputs_of(cache: BlendCache, tokenizer: Any, request: dict[str, Any]) -> BatchEncoding:
    """What `generate` takes for a prompt that `build_request` made, with a cache: ids and mask, `[1, tokens]`."""
    make = cache.inputs_from_messages if "messages" in request else cache.inputs
    return make(tokenizer, **request)


def begun(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    request: dict[str, Any],
    config: BlendConfig | None,
    cache: BlendCache | None = None,
) -> tuple[BlendCache | None, Any]:
    """The cache and the ids that `generate` answers a request with; no cache, for a full prefill, without a config.

    A cache that is given keeps what it holds of the beginning of the request.
    """
    if config is None:
        ids = torch.tensor([ids_of(tokenizer, request)], device=input_device(model))
        return None, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = BlendCache(model, store, config) if cache is None else cache
    return cache, inputs_of(cache, tokenizer, request)


def ids_of(tokenizer: Any, request: dict[str, Any]) -> list[int]:
    """Token ids of a request; those that `inputs_of` gives too."""
    if "messages" in request:
        return list(build_messages(tokenizer, request["messages"], (), {}).ids)
    return list(build(tokenizer, request.get("prefix"), request["chunks"], request["question"]).ids)


def spans_of(tokenizer: Any, request: dict[str, Any]) -> list[Span]:
    """Where the chunks of a request are, from left to right."""
    if "messages" in request:
        return build_messages(tokenizer, request["messages"], request["documents"], {}).spans()
    return build(tokenizer, request.get("prefix"), request["chunks"], request["question"]).spans()


def _has_system_role(tokenizer: Any, told: str) -> bool:
    """Whether the chat template writes a system message; some refuse one, some leave it out."""
    turns = [{"role": "system", "content": told}, {"role": "user", "content": "?"}]
    try:
        return told in render(tokenizer, turns)
    except PromptError:
        return False


@dataclass(frozen=True)
class Method:
    """A way to answer."""

    name: str
    config: BlendConfig | None = None


FULL_PREFILL = Method("full prefill")
REUSE = BlendConfig(recompute_ratio=0.0, selector="none")
FULL_REUSE = Method("full reuse", REUSE)


def blend_config(
    selector: str | None, *, recompute_ratio: float | None = None, is_blind: bool = False, **settings: Any
) -> BlendConfig:
    """Settings of a blend, with the selector's options behind its name; the defaults where nothing is said."""
    if recompute_ratio is not None:
        settings["recompute_ratio"] = recompute_ratio
    if selector is None:
        return default_config(is_blind=is_blind, **settings)
    name, options = _named("selectors", selector)
    if "check_layers" in options:
        settings["check_layers"] = tuple(_layer(layer) for layer in options.pop("check_layers").split("+"))
    return BlendConfig(selector=name, selector_options=options, **settings)


def _named(kind: str, text: str) -> tuple[str, dict[str, str]]:
    """A plugin's name, and the options behind it."""
    name, _, options = text.partition(":")
    pairs = [option.partition("=") for option in options.split(",") if option]
    for option, equals, value in pairs:
        if not equals or not value:
            raise ConfigError(f"the option {option!r} of {text!r} has no value. Write name:option=value,option=value.")
    plugins.load(kind, name)
    return name, {option: value for option, _, value in pairs}


def _layer(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"check_layers has {text!r}, expected layers such as 1 or 1+4.")
    return int(text)


def divergence(logits: Tensor, full: Tensor) -> Tensor:
    """KL divergence of next-token distributions from full prefill's, in nats.

    Shapes: `[tokens, vocabulary]` → `[tokens]`.
    """
    got, expected = (values.double().log_softmax(-1) for values in (logits, full))
    each = nn.functional.kl_div(got, expected, reduction="none", log_target=True)
    return each.masked_fill(expected.isneginf(), 0.0).sum(-1).clamp(min=0)  # of what full prefill never says, nothing


@torch.no_grad()
def token_bytes(model: nn.Module) -> int:
    """Bytes of K and V of one token in all layers, measured on a prompt of one token."""
    ids = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    nbytes = 0
    for layer in model(ids, use_cache=True).past_key_values.layers:
        if isinstance(getattr(layer, "keys", None), Tensor):
            nbytes += layer.keys.nbytes + layer.values.nbytes
    return nbytes


class AnswerStreamer:
    """A streamer that notes when each token comes, and passes the answer on while it is written."""

    def __init__(
        self, tokenizer: Any = None, tell: Callable[[str], None] | None = None, started: float | None = None
    ) -> None:
        self._started = time.perf_counter() if started is None else started
        self._arrived: list[float] = []  # when each new token came
        self._tell, self._text = tell, Detokenizer(tokenizer, ())
        self._ids: list[int] = []
        self._is_prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take new tokens; the first call brings the prompt."""
        if self._is_prompt_seen:
            self._arrived.append(time.perf_counter())
            self._ids += value.flatten().tolist()
            self.end(is_last=False)
        self._is_prompt_seen = True

    def end(self, is_last: bool = True) -> None:
        """Pass on what is new, at the end also what was held back."""
        if self._tell and (new := self._text.feed(self._ids, is_last)):
            self._tell(new)

    @property
    def ttft_ms(self) -> float:
        """From the start of the request to its first new token."""
        return 1e3 * (self._arrived[0] - self._started)

    @property
    def decode_tokens_s(self) -> float:
        """Tokens a second after the first."""
        return (len(self._arrived) - 1) / (self._arrived[-1] - self._arrived[0])


def ends_of(model: nn.Module) -> list[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


class LoopStop(StoppingCriteria):
    """Stops an answer that begins to repeat itself.

    Shapes: ids `[1, tokens]`, of which the first `prompt_tokens` are the prompt's, → `[1]`.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self.is_looping = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """Return True for an answer that is a loop."""
        self.is_looping = is_loop(input_ids[0, self._prompt_tokens :].tolist())
        return torch.full((len(input_ids),), self.is_looping, device=input_ids.device)


def is_loop(ids: Sequence[int]) -> bool:
    """Whether the last tokens of an answer were written again and again, without overlap."""
    last, times, end = list(ids[-LOOP_TOKENS:]), 0, len(ids)
    while end >= LOOP_TOKENS and times < LOOP_TIMES:
        if list(ids[end - LOOP_TOKENS : end]) == last:
            times, end = times + 1, end - LOOP_TOKENS
        else:
            end -= 1
    return times == LOOP_TIMES
