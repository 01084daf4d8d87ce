# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between clients and the server: OpenAI's requests and answers, with `documents` and what was reused."""

import reprlib
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import PromptError
from .limits import Limits
from .prefills import Prefilled

__all__ = ["ChatRequest", "CompletionRequest", "Generation", "Message", "answer_body", "error_body", "usage"]

MOST_TOKENS = (1 << 31) - 1
MOST_CHARS = 400  # of an error
IGNORED = ("user", "store", "metadata", "parallel_tool_calls", "service_tier", "seed")  # change no answer here
NEUTRAL = {  # what is not served, and the values that ask for nothing
    "best_of": (None, 1), "echo": (None, False), "frequency_penalty": (None, 0), "functions": (None, []),
    "logit_bias": (None, {}), "logprobs": (None, False), "n": (None, 1), "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}), "suffix": (None, ""), "tool_choice": (None, "none"),
    "tools": (None, []), "top_logprobs": (None, 0),
}  # fmt: skip

Text = Annotated[str, Field(min_length=1)]


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    def check(self, number: int) -> None:
        """Refuse what would not be in the prompt."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, "", [], {}):
                raise PromptError(f"messages.{number}.{name:.60}={reprlib.repr(value)} is not served. Leave it out.")
        if self.content is None:
            raise PromptError(f"messages.{number} has content={self.content}, expected text. Leave the message out.")


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Generation(BaseModel):
    """What both kinds of requests say."""

    model_config = ConfigDict(extra="allow")
    model: str = ""
    documents: list[Text] = []
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        """Clients send null for what they leave out."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}

    def check(self, limits: Limits) -> None:
        """Refuse what would be ignored although it changes the answer, and more than is taken."""
        for name, value in (self.model_extra or {}).items():
            if name not in NEUTRAL and name not in IGNORED:
                raise PromptError(f"{name:.60} is no field of this request. Leave it out.")
            if name in NEUTRAL and not any(_is_same(value, one) for one in NEUTRAL[name]):
                raise PromptError(f"{name}={reprlib.repr(value)} is not served. Leave it out.")
        if len(self.stops) > limits.stops or not all(self.stops):
            raise PromptError(f"stop has {len(self.stops)} texts, expected at most {limits.stops}, none empty.")
        longest = max(map(len, self.stops), default=0)
        if longest > limits.stop_chars:
            raise PromptError(f"stop has a text of {longest} characters, expected at most {limits.stop_chars}.")
        check_count("documents", len(self.documents), limits.documents)

    @property
    def stops(self) -> list[str]:
        """Where an answer ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def new_tokens(self) -> int | None:
        """Where an answer is cut."""
        return self.max_completion_tokens or self.max_tokens


class ChatRequest(Generation):
    """`/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)

    def check(self, limits: Limits) -> None:
        """As above, and the messages."""
        super().check(limits)
        check_count("messages", len(self.messages), limits.messages)
        for number, message in enumerate(self.messages):
            message.check(number)


class CompletionRequest(Generation):
    """`/v1/completions`."""

    prompt: str | list[int]
    chunk_separator: str = ""

    def check(self, limits: Limits) -> None:
        """As above, and the chunks that the prompt is cut into."""
        super().check(limits)
        cuts = self.prompt.count(self.chunk_separator) if self.chunk_separator and isinstance(self.prompt, str) else 0
        check_count("documents", len(self.documents) + max(0, cuts - 1), limits.documents)


def check_count(what: str, count: int, most: int) -> None:
    """Refuse more than is taken."""
    if count > most:
        raise PromptError(f"{count} {what} came, at most {most} are taken. Send fewer.")


def _is_same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal, and no number stands for a truth value."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def usage(prompt_tokens: int, completion_tokens: int, prefilled: Prefilled | None) -> dict[str, Any]:
    """What a request cost."""
    report = None if prefilled is None else prefilled.report
    recomputed = 0 if report is None else sum(map(len, report.chosen_columns))
    reused = 0 if report is None else report.reused_tokens
    prefix = 0 if prefilled is None else prefilled.prefix_tokens
    prefix += prefilled.tokens if prefilled is not None and prefilled.how == "shared" else 0
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reused + prefix},
        "hf_blend": {
            "prefill": "plain" if prefilled is None else prefilled.how,
            "reused_tokens": reused,
            "recomputed_tokens": recomputed,
            "prefix_tokens": prefix,
            "computed_chunks": 0 if prefilled is None else prefilled.computed_chunks,
            "charged_budget": None if report is None else round(report.charged_budget, 4),
        },
    }


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    given = {"message": _printable(message), "type": kind, "code": code, "param": param and _printable(param)}
    return {"error": given}


def _printable(text: str) -> str:
    """Short enough, and without halves of surrogate pairs, which no body can hold."""
    short = text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"
    return short.encode("utf-8", "backslashreplace").decode()


def answer_body(kind: str, name: str, model: str, choice: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """A whole answer."""
    return {
        "id": name, "object": kind, "created": int(time.time()), "model": model,
        "choices": [{"index": 0, "logprobs": None, **choice}], "usage": costs,
    }  # fmt: skip
