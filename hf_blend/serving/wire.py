# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between clients and the server: OpenAI's requests and answers, with `documents` and what was reused."""

import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import PromptError
from .prefills import Prefilled

__all__ = ["ChatRequest", "CompletionRequest", "Generation", "Message", "answer_body", "error_body", "usage"]

MOST_STOPS = 4
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

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]]


class StreamOptions(BaseModel):
    """How an answer is streamed."""

    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class Generation(BaseModel):
    """What both kinds of requests say."""

    model_config = ConfigDict(extra="allow")
    model: str = ""
    documents: list[Text] = []
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
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

    def check(self) -> None:
        """Refuse what would be ignored although it changes the answer.

        Raises:
            PromptError: a field is unknown, or asks for something that is not served; it is named.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in NEUTRAL and name not in IGNORED:
                raise PromptError(f"{name} is no field of this request. Leave it out.")
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise PromptError(f"{name}={value!r:.60} is not served. Leave it out.")
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise PromptError(f"stop has {len(self.stops)} texts, expected at most {MOST_STOPS}, none empty.")

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


class CompletionRequest(Generation):
    """`/v1/completions`."""

    prompt: str | list[int]
    chunk_separator: str = ""


def usage(prompt_tokens: int, completion_tokens: int, prefilled: Prefilled | None) -> dict[str, Any]:
    """What a request cost.

    Args:
        prompt_tokens: of its prompt.
        completion_tokens: of its answer.
        prefilled: what became of its prefill.

    Returns:
        OpenAI's figures; `prompt_tokens_details.cached_tokens` are those that were not computed. `hf_blend` says how:
        `prefill` ("blended", "shared", "plain"), `reused_tokens` and `recomputed_tokens` among those with stored KV,
        `prefix_tokens` found in the engine's cache, `computed_chunks` that were new.
    """
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
    """An error as OpenAI's clients read it.

    Args:
        message: what, got, expected, do.
        kind: such as "invalid_request_error".
        code: one word for programs.
        param: which field is meant.
    """
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


def answer_body(kind: str, name: str, model: str, choice: dict[str, Any], costs: dict[str, Any]) -> dict[str, Any]:
    """A whole answer.

    Args:
        kind: "chat.completion" or "text_completion".
        name: of the request.
        model: that answered.
        choice: text and reason of the end, as this kind has them.
        costs: from `usage`.
    """
    return {
        "id": name, "object": kind, "created": int(time.time()), "model": model,
        "choices": [{"index": 0, "logprobs": None, **choice}], "usage": costs,
    }  # fmt: skip
