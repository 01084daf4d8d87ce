# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the classes for frameworks share: a prompt is prefilled with stored chunks, and answered with text."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event
from typing import Any

from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..errors import ConfigError, HfBlendError
from ..model.anatomy import cache_argument
from ..model.identity import author_of
from ..prompt.detokenizer import Detokenizer, TokenStreamer
from ..prompt.messages import text_with_documents, with_documents
from ..prompt.pieces import tokenizer_digest
from ..store import ChunkStore

__all__ = ["Answer", "Answerer"]

Inputs = Callable[[BlendCache], Mapping[str, Tensor]]
SAME = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens")  # OpenAI's names


@dataclass(frozen=True)
class Answerer:
    """Answers with a model, and reuses what a store holds of the prompt.

    `config` None: the recipe in the store for this model, else the defaults. `settings` are arguments of `generate`,
    such as `max_new_tokens`; those of a call are added to them.
    """

    model: Any
    tokenizer: Any
    store: ChunkStore
    config: BlendConfig | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.store, ChunkStore):
            raise ConfigError(f'store is {self.store!r:.60}, expected ChunkStore.open("kv-store"). Pass one.')

    @property
    def identity(self) -> str:
        """A digest of all that decides an answer beside the arguments of a call, for a cache of answers."""
        parts = (
            author_of(self.model),
            self.model.generation_config.to_json_string(),
            tokenizer_digest(self.tokenizer),
            getattr(self.tokenizer, "chat_template", None),
            self.config or self.store.recipe(self.model),
            sorted(self.settings.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Any = (),
        template: Mapping[str, Any] | None = None,
        stops: str | Sequence[str] | None = None,
        **settings: Any,
    ) -> "Answer":
        """Answer messages by the model's own chat template. The answer is computed while it is iterated over.

        Documents that are in no message are put before the first message of the user; empty ones among others are left
        out with a warning. `template` has further arguments of `apply_chat_template`. The texts in `stops` end the
        answer, without being part of it. `settings` are those of `generate`.
        """
        placed, texts = with_documents(messages, documents)

        def inputs(cache: BlendCache) -> Mapping[str, Tensor]:
            return cache.inputs_from_messages(self.tokenizer, placed, texts, **(template or {}))

        return self._answer(inputs, stops, settings)

    def complete(
        self, text: str, documents: Any = (), stops: str | Sequence[str] | None = None, **settings: Any
    ) -> "Answer":
        """Continue a text, as `chat` answers; documents that are not in it are put before it."""
        whole, texts = text_with_documents(text, documents)
        return self._answer(lambda cache: cache.inputs_from_text(self.tokenizer, whole, texts), stops, settings)

    def _answer(self, inputs: Inputs, stops: str | Sequence[str] | None, settings: Mapping[str, Any]) -> "Answer":
        options = {SAME.get(name, name): value for name, value in {**self.settings, **settings}.items()}
        temperature = options.pop("temperature", None)
        if temperature is not None:  # 0, as frameworks have it, is greedy search
            options["do_sample"] = temperature != 0
            if temperature != 0:
                options["temperature"] = temperature
        ends = [stops] if isinstance(stops, str) else list(stops or ())
        if not all(ends):
            raise ConfigError(f"stop is {stops!r:.60}, expected texts, none of them empty. Leave it out.")
        return Answer(self, BlendCache(self.model, self.store, self.config), inputs, ends, options)


class Answer:
    """An answer, computed while it is iterated over; closing the iterator ends it at its next token.

    `tokens` are the ids of the answer so far, also that of an end token.
    """

    def __init__(
        self, by: Answerer, cache: BlendCache, inputs: Inputs, stops: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        self._model = by.model
        self._cache = cache
        self._inputs = inputs
        self._settings = settings
        self._detokenizer = Detokenizer(by.tokenizer, stops)
        self.prompt_tokens = 0
        self.tokens: list[int] = []

    def __iter__(self) -> Iterator[str]:
        """Yield the text piece by piece."""
        arrived: SimpleQueue[list[int] | None] = SimpleQueue()
        is_closed = Event()
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(self._generate, arrived.put, is_closed)
            run.add_done_callback(lambda _: arrived.put(None))
            try:
                while not self._detokenizer.is_stopped:
                    tokens = arrived.get()
                    if tokens is None:
                        break
                    self.tokens += tokens
                    text = self._detokenizer.feed(self.tokens, is_last=False)
                    if text:
                        yield text
            finally:
                is_closed.set()
        run.result()
        if not self._detokenizer.is_stopped:
            text = self._detokenizer.feed(self.tokens, is_last=True)
            if text:
                yield text

    def whole(self) -> "Answer":
        """Compute all of the answer, and return it."""
        for _ in self:
            pass
        return self

    @property
    def text(self) -> str:
        """The text so far."""
        return str(self._detokenizer.text)

    @property
    def reason(self) -> str:
        """Why it ended: "stop" at an end token or a stop text, "length" at `max_new_tokens`."""
        ends = self._settings.get("eos_token_id", self._model.generation_config.eos_token_id)
        if isinstance(ends, int):
            ends = [ends]
        is_ended = bool(self.tokens) and self.tokens[-1] in (ends or ())
        return "stop" if is_ended or self._detokenizer.is_stopped else "length"

    @property
    def reused_tokens(self) -> int:
        """The number of tokens of the prompt whose stored K and V were used unchanged."""
        return self._cache.report.reused_tokens

    @property
    def report(self) -> dict[str, Any]:
        """What the prefill cost, as JSON values."""
        figures = self._cache.report.to_dict()
        figures.pop("chosen_columns")
        return figures

    @property
    def meta(self) -> dict[str, Any]:
        """`finish_reason`, `usage` as of OpenAI, and what the prefill cost."""
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        }
        return {"finish_reason": self.reason, "usage": usage, "hf_blend": self.report}

    def _generate(self, tell: Callable[[list[int]], None], is_closed: Event) -> None:
        inputs = self._inputs(self._cache)
        self.prompt_tokens = inputs["input_ids"].shape[1]

        def closed(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            return ids.new_full(ids.shape[:1], is_closed.is_set()).bool()

        arguments = {**inputs, **cache_argument(self._model, self._cache), "streamer": TokenStreamer(tell)}
        try:
            self._model.generate(**arguments, stopping_criteria=StoppingCriteriaList([closed]), **self._settings)
        except HfBlendError:
            raise
        except (ValueError, TypeError) as error:  # which is how it refuses arguments
            names = ", ".join(self._settings) or "no settings"
            raise ConfigError(f"generate failed with {names}: {type(error).__name__}: {error}") from error
