# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the classes for frameworks share: a prompt is prefilled with stored chunks, and answered with text."""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from numbers import Integral
from queue import SimpleQueue
from threading import Event
from typing import Any

from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..errors import ConfigError, HfBlendError, PromptError
from ..model.cache_keyword import KEYWORDS, cache_argument
from ..prompt.detokenizer import Detokenizer
from ..prompt.documents import absent, for_template, leave_out_empty, texts_of
from ..prompt.messages import plain_messages, render
from ..store import ChunkStore

__all__ = ["NO_CALLS", "Answer", "Answerer"]

Inputs = Callable[[BlendCache], Mapping[str, Tensor]]
BETWEEN = "\n\n"
RESERVED = (*KEYWORDS, "streamer", "stopping_criteria", "input_ids")  # arguments of `generate` that are set here
SAME = dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_new_tokens")  # OpenAI's names
SINGLE = ("n", "num_beams", "num_return_sequences")  # must be 1
UNLISTED = ("tokenizer", "assistant_tokenizer")  # arguments of `generate` that are in no signature
CALLS = ("tools", "tool_choice", "functions", "response_format")  # settings of models that call tools
NO_CALLS = (
    "it answers with text, in which no call of a tool and no JSON is read. `template={'tools': [...]}` has the chat "
    "template write tools; hf-blend serve reads calls and follows schemas, for the framework's class for OpenAI."
)
PROBE = "hf_blend asks whether the template takes documents"


@dataclass(frozen=True)
class Answerer:
    """Answers with a model, and reuses what a store holds of the prompt.

    `settings` are arguments of `generate`, such as `max_new_tokens`; those of a call are added to them.
    """

    model: Any
    tokenizer: Any
    store: ChunkStore
    config: BlendConfig = field(default_factory=BlendConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no model, tokenizer or store, and settings that `generate` does not take."""
        for name, value, method, expected in (
            ("model", self.model, "generate", "a model of transformers"),
            ("tokenizer", self.tokenizer, "decode", "the model's tokenizer"),
            ("store", self.store, "keys", 'a ChunkStore, such as ChunkStore.open("kv-store")'),
        ):
            if not callable(getattr(value, method, None)):
                raise ConfigError(f"{name} is {value!r:.60}, expected {expected}. Pass one.")
        self._checked({})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        documents: Any = (),
        template: Mapping[str, Any] | None = None,
        stops: Sequence[str] = (),
        **settings: Any,
    ) -> "Answer":
        """Answer messages by the model's own chat template. The answer is computed while it is iterated over.

        Documents that are in no message go to the template if it takes documents, else before the last message of the
        user; empty ones among others are left out with a warning. `template` has further arguments of
        `apply_chat_template`. The texts in `stops` end the answer, without being part of it. `settings` are those of
        `generate`.
        """
        filled, notice = leave_out_empty(documents)
        more = {} if template is None else template
        if not isinstance(more, Mapping):
            raise ConfigError(
                f"template is {more!r:.60}, expected a dict of arguments of the chat template. Pass one."
            )
        arguments = (self.tokenizer, *self._placed(plain_messages(messages), filled, more))
        answer = self._answer(lambda cache: cache.inputs_from_messages(*arguments, **more), stops, settings)
        answer.notice = notice
        return answer

    def complete(self, text: str, documents: Any = (), stops: Sequence[str] = (), **settings: Any) -> "Answer":
        """Continue a text, as `chat` answers; documents that are not in it are put before it."""
        filled, notice = leave_out_empty(documents)
        texts = texts_of(filled, [text])
        whole = BETWEEN.join([*absent(texts, [text]), text])
        answer = self._answer(lambda cache: cache.inputs_from_text(self.tokenizer, whole, texts), stops, settings)
        answer.notice = notice
        return answer

    def _answer(self, inputs: Inputs, stops: Sequence[str], settings: Mapping[str, Any]) -> "Answer":
        options = self._checked(settings)
        ends = [stops] if isinstance(stops, str) else list(stops or ())
        if not all(isinstance(end, str) and end for end in ends):
            raise ConfigError(f"stop is {stops!r:.60}, expected a text, or texts, none empty. Correct it.")
        return Answer(self, BlendCache(self.model, self.store, self.config), inputs, ends, options)

    def _checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments for `generate`; a temperature of 0, as frameworks have it, becomes greedy search."""
        options: dict[str, Any] = {}
        for name, value in (*self.settings.items(), *settings.items()):
            if name in RESERVED:
                raise ConfigError(f"{name} was passed for generate, but it is set here. Leave it out.")
            if name in CALLS:
                raise ConfigError(f"{name}={value!r:.40} came, but {NO_CALLS}")
            if name not in ("n", *SAME) and name not in (accepted := _arguments(self.model)):
                near = difflib.get_close_matches(name, accepted, n=1)
                advice = f"Write {near[0]}, or leave it out." if near else "Leave it out."
                raise ConfigError(f"{name}={value!r:.40} is no argument of generate. {advice}")
            options[SAME.get(name, name)] = value
        own = options.get("generation_config") or self.model.generation_config
        for name in SINGLE:
            count = options.get(name) or getattr(own, name, None) or 1
            if count != 1:
                raise ConfigError(f"{name} is {count}, expected 1: one answer is given, while it is written. Pass 1.")
        options.pop("n", None)
        tokens = options.get("max_new_tokens")
        if tokens is not None and (not isinstance(tokens, Integral) or tokens < 1):
            raise ConfigError(f"max_new_tokens is {tokens!r:.40}, expected a whole number from 1 on. Correct it.")
        temperature = options.pop("temperature", None)
        if temperature is None:
            return options
        if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
            raise ConfigError(f"temperature is {temperature!r:.40}, expected a number from 0 on. Correct it.")
        return {**options, "do_sample": temperature > 0, **({"temperature": temperature} if temperature > 0 else {})}

    def _placed(
        self, messages: Sequence[Mapping[str, Any]], documents: Sequence[Any], template: Mapping[str, Any]
    ) -> tuple[list[Mapping[str, Any]], Sequence[str | Mapping[str, Any]]]:
        """Return messages with all documents in them, or documents for a template that writes them itself."""
        chat = list(messages)
        contents = [message["content"] for message in chat]
        texts = texts_of(documents, contents)
        added = absent(texts, contents)
        if not added:
            return chat, texts
        if len(added) == len(texts) and self._takes_documents(chat, template):
            return chat, [for_template(document) for document in documents]
        last = max((at for at, message in enumerate(chat) if message.get("role") == "user"), default=None)
        if last is None:
            raise PromptError(
                f"{len(documents)} documents came with {len(chat)} messages, but none of the messages has the role "
                "user, before which documents are put. Add one with the question."
            )
        chat[last] = {**chat[last], "content": BETWEEN.join([*added, contents[last]])}
        return chat, texts

    def _takes_documents(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> bool:
        arguments = {**template, "documents": [{"title": PROBE, "text": PROBE}]}
        return bool(getattr(self.tokenizer, "chat_template", None)) and PROBE in render(
            self.tokenizer, messages, **arguments
        )


class Answer:
    """An answer, computed while it is iterated over; closing the iterator ends it at its next token.

    `tokens` are the ids of the answer so far, also that of an end token.
    """

    def __init__(
        self, by: Answerer, cache: BlendCache, inputs: Inputs, stops: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        self._by, self._cache, self._inputs, self._settings = by, cache, inputs, settings
        self._detokenizer = Detokenizer(by.tokenizer, stops)
        self.prompt_tokens = 0
        self.tokens: list[int] = []
        self.notice = ""  # about documents that were left out

    def __iter__(self) -> Iterator[str]:
        """Yield the text piece by piece."""
        new: SimpleQueue[list[int] | None] = SimpleQueue()
        is_closed = Event()
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(self._generate, new.put, is_closed)
            run.add_done_callback(lambda _: new.put(None))
            try:
                while not self._detokenizer.is_stopped and (tokens := new.get()) is not None:
                    self.tokens += tokens
                    if text := self._detokenizer.feed(self.tokens, is_last=False):
                        yield text
            finally:
                is_closed.set()
        run.result()
        if not self._detokenizer.is_stopped and (text := self._detokenizer.feed(self.tokens, is_last=True)):
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
        ends = self._settings.get("eos_token_id", self._by.model.generation_config.eos_token_id)
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        is_ended = self._detokenizer.is_stopped or bool(self.tokens and self.tokens[-1] in ends)
        return "stop" if is_ended else "length"

    @property
    def reused_tokens(self) -> int:
        """The number of tokens of the prompt whose stored K and V were used unchanged."""
        return self._cache.report.reused_tokens

    @property
    def report(self) -> dict[str, Any]:
        """What the prefill cost, as JSON values."""
        figures = self._cache.report.to_dict()
        notice = " ".join(filter(None, (self.notice, figures["notice"])))
        return {name: value for name, value in figures.items() if name != "chosen_columns"} | {"notice": notice}

    @property
    def meta(self) -> dict[str, Any]:
        """`finish_reason`, `usage` as of OpenAI, and what the prefill cost."""
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.tokens)}
        details = {"prompt_tokens_details": {"cached_tokens": self.reused_tokens}}
        return {"finish_reason": self.reason, "usage": {**usage, **details}, "hf_blend": self.report}

    def _generate(self, tell: Callable[[list[int]], None], is_closed: Event) -> None:
        inputs = self._inputs(self._cache)
        self.prompt_tokens = inputs["input_ids"].shape[1]
        criteria = StoppingCriteriaList(
            [lambda ids, scores, **_: ids.new_full(ids.shape[:1], is_closed.is_set()).bool()]
        )
        cache = cache_argument(self._by.model, self._cache)
        arguments = {**inputs, **cache, "stopping_criteria": criteria, **self._settings}
        try:
            self._by.model.generate(**arguments, streamer=_NewTokens(tell))
        except HfBlendError:
            raise
        except (ValueError, TypeError) as error:  # which is how it refuses arguments
            names = ", ".join(self._settings) or "no settings"
            raise ConfigError(f"generate failed with {names}: {type(error).__name__}: {error}") from error


class _NewTokens(BaseStreamer):
    """Passes on the tokens of the answer. A stopping criterion would also see candidates of assisted decoding."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        self._tell, self._is_prompt_seen = tell, False

    def put(self, value: Tensor) -> None:
        """Drop the prompt, which comes first, and pass on the tokens of each step."""
        if self._is_prompt_seen:
            self._tell(value.flatten().tolist())
        self._is_prompt_seen = True

    def end(self) -> None:
        """Do nothing: no token is held back."""


def _arguments(model: Any) -> Collection[str]:
    """Return the names of the arguments that `generate` takes for a model, which an adapter may wrap."""
    inner = getattr(model, "get_base_model", lambda: model)()
    signatures = (inspect.signature(method) for method in (inner.generate, inner.forward))
    return {*vars(GenerationConfig()), *(name for signature in signatures for name in signature.parameters), *UNLISTED}
