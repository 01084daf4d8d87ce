# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests in the model's own form of a prompt, and what methods, streams and runs over them have in common."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, PromptError
from hf_blend.model.anatomy import input_device
from hf_blend.prompt.detokenizer import Detokenizer
from hf_blend.prompt.messages import build_messages, render
from hf_blend.prompt.pieces import Span, build

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
    documents = [text for turn in history for text in turn.documents]
    if not getattr(tokenizer, "chat_template", None):
        text = question
        if history:
            earlier = [f"Question: {turn.question}\nAnswer: {turn.answer}\n" for turn in history]
            text = f"{''.join(earlier)}Question: {question}\nAnswer:"
        return {"prefix": system or None, "chunks": [*documents, *chunks], "question": text}

    texts = tuple(chunk if isinstance(chunk, str) else tokenizer.decode(chunk) for chunk in chunks)
    instruction = INSTRUCTION if system is None else system
    has_system = bool(instruction) and _has_system_role(tokenizer, instruction)
    messages = []
    if has_system:
        messages.append({"role": "system", "content": instruction})
    for turn in (*history, Turn(question, "", texts)):
        content = turn.question
        passages = "".join(turn.documents).rstrip()
        if passages:
            content = f"{passages}\n\nQuestion: {content}"
        if instruction and not messages:  # the template has no system message
            content = f"{instruction}\n\n{content}"
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": turn.answer})
    del messages[-1]  # the answer that is asked for
    return {"messages": messages, "documents": [text for text in (*documents, *texts) if text.strip()]}


def inputs_of(cache: BlendCache, tokenizer: Any, request: dict[str, Any]) -> BatchEncoding:
    """What `generate` takes for a prompt that `build_request` made, with a cache: ids and mask, `[1, tokens]`."""
    if "messages" in request:
        return cache.inputs_from_messages(tokenizer, **request)
    return cache.inputs(tokenizer, **request)


def begin(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    request: dict[str, Any],
    config: BlendConfig | None,
    cache: BlendCache | None = None,
) -> tuple[BlendCache | None, Any]:
    """The cache and the inputs that `generate` answers a request with; no cache, for a full prefill, without a config.

    A cache that is given keeps what it holds of the beginning of the request.
    """
    if config is None:
        ids = torch.tensor([ids_of(tokenizer, request)], device=input_device(model))
        return None, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if cache is None:
        cache = BlendCache(model, store, config)
    return cache, inputs_of(cache, tokenizer, request)


def ids_of(tokenizer: Any, request: dict[str, Any]) -> list[int]:
    """Token ids of a request; those that `inputs_of` gives too."""
    if "messages" in request:
        return list(build_messages(tokenizer, request["messages"], (), {}).ids)
    return list(build(tokenizer, request.get("prefix"), request["chunks"], request["question"]).ids)


def spans_of(tokenizer: Any, request: dict[str, Any]) -> Sequence[Span]:
    """Where the chunks of a request are, from left to right."""
    if "messages" in request:
        return build_messages(tokenizer, request["messages"], request["documents"], {}).spans
    return build(tokenizer, request.get("prefix"), request["chunks"], request["question"]).spans


def _has_system_role(tokenizer: Any, instruction: str) -> bool:
    """Whether the chat template writes a system message; some refuse one, some leave it out."""
    turns = [{"role": "system", "content": instruction}, {"role": "user", "content": "?"}]
    try:
        return instruction in render(tokenizer, turns)
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


def blend_config(selector: str | None, *, recompute_ratio: float | None = None, **settings: Any) -> BlendConfig:
    """Settings of a blend, with the selector's options behind its name; the defaults where nothing is said."""
    if recompute_ratio is not None:
        settings["recompute_ratio"] = recompute_ratio
    if selector is None:
        return BlendConfig(**settings)
    name, _, listed = selector.partition(":")
    options = {}
    for part in filter(None, listed.split(",")):
        option, _, value = part.partition("=")
        if not value:
            raise ConfigError(
                f"the option {option!r} of {selector!r} has no value. Write name:option=value,option=value."
            )
        options[option] = value
    plugins.load("selectors", name)
    if "check_layer" in options:
        layer = options.pop("check_layer")
        if not layer.isdecimal():
            raise ConfigError(f"check_layer has {layer!r}, expected a layer such as 1.")
        settings["check_layer"] = int(layer)
    return BlendConfig(selector=name, selector_options=options, **settings)


def divergence(logits: Tensor, full: Tensor) -> Tensor:
    """KL divergence of next-token distributions from full prefill's, in nats.

    Shapes: `[tokens, vocabulary]` → `[tokens]`.
    """
    expected = full.double().log_softmax(-1)
    terms = nn.functional.kl_div(logits.double().log_softmax(-1), expected, reduction="none", log_target=True)
    terms = terms.masked_fill(expected.isneginf(), 0.0)  # what full prefill never says adds nothing
    return terms.sum(-1).clamp(min=0)


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
    """A streamer that records when each token comes, and passes the answer on while it is written."""

    def __init__(
        self, tokenizer: Any = None, tell: Callable[[str], None] | None = None, started: float | None = None
    ) -> None:
        self._started = time.perf_counter() if started is None else started
        self._times: list[float] = []  # of each new token
        self._tell = tell
        self._detokenizer = Detokenizer(tokenizer, ())
        self._ids: list[int] = []
        self._is_prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Receive new tokens; the first call brings the prompt."""
        if self._is_prompt_seen:
            self._times.append(time.perf_counter())
            self._ids += value.flatten().tolist()
            self.end(is_last=False)
        self._is_prompt_seen = True

    def end(self, is_last: bool = True) -> None:
        """Pass on what is new, at the end also what was kept back."""
        if self._tell is None:
            return
        text = self._detokenizer.feed(self._ids, is_last)
        if text:
            self._tell(text)

    @property
    def ttft_ms(self) -> float:
        """From the start of the request to its first new token."""
        return 1e3 * (self._times[0] - self._started)

    @property
    def decode_tokens_s(self) -> float:
        """Tokens a second after the first."""
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def ends_of(model: nn.Module) -> list[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())
