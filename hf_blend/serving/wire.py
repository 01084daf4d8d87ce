# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests with `documents`: which fields are served, within which limits, and how others are refused."""

import difflib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import HfBlendError

__all__ = ["ChatRequest", "CompletionRequest", "Generation", "Refused", "RequestLimits", "read_request"]

ELSEWHERE = "vLLM with the connector of hf_blend serves more (docs/vllm.md)"
FAILED = "the server failed to answer; its log says why. Send the request again."
TOO_LONG = "context_length_exceeded"  # OpenAI's code, which clients look for
MOST_SEED = 1 << 63
MOST_CHARS = 400  # of the text of an error
UNION_BRANCH = re.compile(r"str|list\[.*|dict\[.*")  # in a path of pydantic: which type was tried, no field

# These change nothing about an answer.
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
# What clients send to say that they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True)
class RequestLimits:
    """What the server accepts. `docs/serving.md` has the same rows."""

    queue: int = 16  # requests that wait behind the one under way
    body_bytes: int = 1 << 20
    body_s: float = 20.0  # seconds for a body to arrive
    request_s: float = 300.0  # seconds from a request's arrival to its last token
    tokens: int | None = None  # of a prompt and its answer; None: as many as the model has positions
    new_tokens: int = 256  # where an answer is cut that names no length
    documents: int = 256  # of one request
    messages: int = 1024  # of one request, and parts of each
    stops: int = 4  # texts at which an answer ends
    stop_chars: int = 256  # of each
    conversations: int = 4  # whose K and V are kept for their next turn


class Refused(HfBlendError):
    """A request that is answered with an error: its status, and the field that it is about, if any."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str = "bad_request") -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the response, as OpenAI's clients read it."""
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}.get(self.status)
        return {
            "error": {
                "message": _shortened(str(self)),
                "type": kind or "invalid_request_error",
                "code": self.code,
                "param": self.param and _shortened(self.param),
            }
        }


class Fields(BaseModel):
    """Fields that are what they say: a text is no number, and no others are beside them."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Fields):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool = False


Count: TypeAlias = Annotated[int, Field(ge=1, lt=1 << 31)]


class Generation(Fields):
    """The fields that chats and completions have in common."""

    model: str = ""
    documents: list[str | dict[str, Any]] = Field(default=[])
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MOST_SEED, lt=MOST_SEED)] | None = None
    stop: str | list[str] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says so."""
        return self.max_tokens

    def check(self, limits: RequestLimits) -> None:
        """Refuse texts that are beyond the limits."""
        for text in self.stops:
            if not 0 < len(text) <= limits.stop_chars:
                raise Refused(
                    f"stop has a text of {len(text)} characters, expected 1 to {limits.stop_chars}. Correct it.",
                    "stop",
                )


class ChatRequest(Generation):
    """`/v1/chat/completions`."""

    TEXT: ClassVar = "messages"  # the field that the text is in
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says so."""
        return self.max_completion_tokens or self.max_tokens

    def check(self, limits: RequestLimits) -> None:
        """Also refuse a conversation in which nobody asks."""
        super().check(limits)
        if not any(message.role == "user" for message in self.messages):
            raise Refused("messages has none with the role 'user', expected a question. Add one.", "messages")


class CompletionRequest(Generation):
    """`/v1/completions`."""

    TEXT: ClassVar = "prompt"
    prompt: Annotated[str, Field(min_length=1)]


Request = TypeVar("Request", bound=Generation)


def read_request(kind: type[Request], body: bytes, limits: RequestLimits) -> Request:
    """Return the fields of a request; raises `Refused` with the name of the field that is not served."""
    fields = _parse(body)
    served: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        if name in kind.model_fields:
            served[name] = value
        elif not any(type(value) is type(one) and value == one for one in NEUTRAL.get(name, ())):
            raise _unserved(name, kind)
    _check_counts(served, limits)
    if isinstance(served.get("messages"), list):
        served["messages"] = [_without_empty(message) for message in served["messages"]]
    try:
        request = kind.model_validate(served)
    except ValidationError as error:
        raise _described(error) from None
    request.check(limits)
    return request


def _parse(body: bytes) -> dict[str, Any]:
    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        fields = json.loads(body, parse_constant=refuse_constant)
        json.dumps(fields, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except RecursionError:
        raise Refused("the body is nested too deeply. Send lists and objects of fewer levels.") from None
    except ValueError as error:  # also bytes that are no text, and numbers of thousands of digits
        raise Refused(f"the body is no JSON: {error}. Correct it.") from None
    if not isinstance(fields, dict):
        raise Refused(f"the body is {reprlib.repr(fields)}, expected an object of JSON. Send one.")
    return fields


def _unserved(name: str, kind: type[Generation]) -> Refused:
    near = difflib.get_close_matches(name, kind.model_fields, n=1) if len(name) < 40 else []
    advice = f"Write {near[0]!r}, or leave it out" if near else "Leave it out"
    return Refused(f"{name!r:.60} is not served here. {advice}; {ELSEWHERE}.", name, code="not_served")


def _without_empty(message: Any) -> Any:
    """A message without fields that say nothing: clients send answers back with all fields of their classes."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name in Message.model_fields or value}


def _described(error: ValidationError) -> Refused:
    """Say what came in the innermost field with an error, and what was expected there."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda one: len(one["loc"]))
    names = [str(name) for name in first["loc"]]
    param = ".".join(name for name in names if not UNION_BRANCH.fullmatch(name))
    kind = first["type"]
    if kind == "extra_forbidden" or (kind == "literal_error" and names[-1] in ("role", "type")):
        came = f" {first['input']!r:.40}" if kind == "literal_error" else ""
        return Refused(f"{param}{came} is not served here. Leave it out; {ELSEWHERE}.", param, code="not_served")
    if kind == "missing":
        return Refused(f"{param} is missing, expected a value. Send it.", param)
    same = [one["msg"].removeprefix("Input should be ") for one in errors if one["loc"][:-1] == first["loc"][:-1]]
    expected = " or ".join(dict.fromkeys(same)) if UNION_BRANCH.fullmatch(names[-1]) else same[0]
    return Refused(f"{param} is {reprlib.repr(first['input'])}, expected {expected}. Correct it.", param)


def _check_counts(fields: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse lists that are too long before any of their elements is looked at."""
    most = {"documents": limits.documents, "messages": limits.messages, "stop": limits.stops}
    lists = {name: fields[name] for name in most if isinstance(fields.get(name), list)}
    for name, values in lists.items():
        _check_count(name, len(values), most[name])
    for message in lists.get("messages", []):
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            _check_count("content", len(message["content"]), limits.messages)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise Refused(f"{name} has {count} elements, at most {most} are accepted. Send fewer.", name)


def _shortened(text: str) -> str:
    short = text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"
    return short.encode("utf-8", "backslashreplace").decode()
