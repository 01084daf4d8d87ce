# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests with `documents`, the limits of a server, and its errors.

The models say which fields are taken, and within which bounds. Another field is refused by its name.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import Field, ValidationError, model_validator

from ..errors import HfBlendError, PromptError
from .messages import Fields, Ignored, Message, Rows, UnknownField


@dataclass(frozen=True)
class Limits:
    """What a server takes, and a proxy in front of vLLM. `docs/serving.md` has the same rows."""

    requests: int = 64  # under way or waiting, of all tenants; each answer of a request counts
    connections: int = 64  # of one address that carry no whole request: silent, half sent, or kept alive
    header_s: float = 20.0  # how long a connection may carry none
    body_bytes: int = 4 << 20  # of a request
    body_s: float = 20.0  # how long its body may take to arrive
    bodies: int = 64  # of a tenant that arrive at once
    arriving_bytes: int = 1 << 26  # of them together, of which a single body may be all
    request_s: float = 300.0  # how long it may take altogether
    new_tokens: int = 256  # where an answer is cut that names no length
    documents: int = 256  # of one request, and places of its prompt where they are
    messages: int = 1024  # of one request
    parts: int = 4096  # of its contents, and tool calls in it
    render_s: float = 1.0  # CPU seconds that the chat template may take for it
    images: int = 8  # of one request
    pixels: int = 1 << 22  # of its images together
    aspect_ratio: float = 50.0  # the longer side of an image by the shorter
    image_bytes: int = 1 << 27  # that the processor makes of them
    choices: int = 32  # answers to one request, `n` to each of its prompts
    tools: int = 128  # of one request
    schema_chars: int = 1 << 16  # of a JSON schema, or of those of all tools
    stops: int = 4  # texts at which an answer ends
    stop_chars: int = 256  # of each
    stuck_s: float = 60.0  # after so long without any progress of what is under way the server is not ready


MOST_TOKENS = (1 << 31) - 1
MOST_SEED = 1 << 64
MOST_LOGPROBS = 20
MOST_BIASES = 1024
MOST_CHARS = 400  # of an error
MOST_LEVELS = 100  # of lists and objects in each other

PART = re.compile(r"(\bcontent\.\d+)\.(text|refusal|image_url)\b")  # the kind of a part is no name
TYPE = re.compile(r"(str|int|json|dict|list|literal|constrained-\w+|function-\w+|[A-Z]\w+)(\[.*\])?", re.DOTALL)

Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=MOST_TOKENS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Empty: TypeAlias = Annotated[list[Any], Field(max_length=0)]  # of what is not served, the value that asks for nothing


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: bool = False  # pads what is sent; nothing does here


class Function(Fields):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class JsonSchema(Fields):
    """A schema that an answer follows."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("a json_schema with type 'json_schema', and none with others")
        return self


class Generation(Fields):
    """The fields that chats and completions have in common."""

    model: str = ""
    documents: list[Any] = Field([])  # as `prompt.documents` reads them
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[Annotated[int, Field(ge=0)], Bias], Field(max_length=MOST_BIASES)] = Field({})
    seed: Annotated[int, Field(ge=-MOST_SEED, le=MOST_SEED)] | None = None
    ignore_eos: bool = False
    stop: str | Rows[str] = Field([])
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat(type="text")

    user: Ignored = None  # from here on: changes no answer
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None

    def bound(self, limits: Limits) -> None:
        """Refuse what is beyond the limits of a server or a proxy."""
        if not all(self.stops):
            raise PromptError(f"stop has {len(self.stops)} texts, expected at most {limits.stops}, none empty.")
        longest = max(map(len, self.stops), default=0)
        if longest > limits.stop_chars:
            raise PromptError(f"stop has a text of {longest} characters, expected at most {limits.stop_chars}.")
        check_count("answers", self.choices, limits.choices)
        check_chars("response_format", self.response_format.model_dump(exclude_unset=True), limits)
        if self.json_form is not None:
            check_chars("response_format", self.json_form, limits)

    def check(self, limits: Limits) -> None:
        """Refuse what the server does not take, but vLLM may."""
        self.bound(limits)
        if self.json_form is not None and self.ignore_eos:
            raise PromptError("ignore_eos came with an answer that ends with its JSON. Leave one of both out.")

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n

    @property
    def json_form(self) -> dict[str, Any] | None:
        """The JSON schema that the answer follows, if any."""
        form = self.response_format
        if form.json_schema is not None:
            return form.json_schema.schema_
        return {"type": "object"} if form.type == "json_object" else None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says it."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to name beside each; None without log probabilities."""
        return None


class ChatRequest(Generation):
    """`/v1/chat/completions`."""

    messages: Annotated[Rows[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0
    tools: Rows[Tool] = Field([])
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"
    chat_template_kwargs: dict[str, Any] = Field({})
    modalities: Rows[Literal["text"]] = Field(["text"])

    parallel_tool_calls: Ignored = None  # from here on: changes no answer
    verbosity: Ignored = None
    prompt_cache_options: Ignored = None

    functions: Empty = Field([])  # from here on: not served
    reasoning_effort: Literal["none"] | None = None
    moderation: Literal[False] = False
    function_call: Literal["none", "auto"] = "none"
    audio: Literal[False] = False
    prediction: Literal[False] = False
    web_search_options: Literal[False] = False

    def bound(self, limits: Limits) -> None:
        """Also refuse messages without content, and large schemas of tools."""
        super().bound(limits)
        for number, message in enumerate(self.messages):
            if message.refusal and message.content:
                raise FieldError(
                    f"messages.{number}.refusal",
                    f"messages.{number}.refusal came beside a content, expected one of both. Leave one out.",
                )
            thoughts = message.reasoning_content or message.reasoning
            if message.content is None and not (message.tool_calls or message.refusal or thoughts):
                raise PromptError(f"messages.{number}.content is missing, expected text. Leave the message out.")
        check_chars("tools", [tool.function.parameters for tool in self.tools], limits)

    def check(self, limits: Limits) -> None:
        """Also refuse fields of chats that contradict each other."""
        super().check(limits)
        names = [tool.function.name for tool in self.tools]
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        if (chosen and chosen not in names) or (self.tool_choice == "required" and not names):
            raise PromptError(f"tool_choice is {chosen or 'required'!r:.60}, expected one of tools: {names!r:.80}.")
        if self.top_logprobs and not self.logprobs:
            raise PromptError(f"top_logprobs is {self.top_logprobs}, expected 0 without logprobs. Add logprobs: true.")
        if super().json_form is not None and self.callable:
            raise PromptError("response_format came with tools, expected one of both. Add tool_choice: 'none'.")

    @property
    def callable(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def json_form(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or of the call if there has to be one."""
        if self.tool_choice in ("none", "auto"):
            return super().json_form
        name = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        rows = [tool.function for tool in self.tools if name in (None, tool.function.name)]
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in rows
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says it."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to name beside each; None without log probabilities."""
        return self.top_logprobs if self.logprobs else None


Ids: TypeAlias = Rows[TokenId]


class CompletionRequest(Generation):
    """`/v1/completions`."""

    prompt: str | Ids | Rows[str] | Rows[Ids]
    chunk_separator: str = ""
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_LOGPROBS)] | None = None

    best_of: Literal[1] = 1  # from here on: not served
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    def bound(self, limits: Limits) -> None:
        """Also refuse a prompt without text, or of too many chunks."""
        if not self.prompts:
            raise PromptError("prompt has no text, expected at least one. Send some.")
        super().bound(limits)
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str) and self.chunk_separator]
        cuts = max((prompt.count(self.chunk_separator) for prompt in texts), default=0)
        check_count("documents", len(self.documents) + max(0, cuts - 1), limits.documents)

    @property
    def prompts(self) -> list[str | Ids]:
        """The prompts, also if there is one."""
        prompt = self.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [prompt] if is_one else [*prompt]  # type: ignore[list-item]

    @property
    def choices(self) -> int:
        """The number of answers."""
        return self.n * len(self.prompts)

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens to name beside each; None without log probabilities."""
        return self.logprobs


class ServiceError(HfBlendError, RuntimeError):
    """The engine could not answer a request; it goes on with others."""


class Stopping(HfBlendError):
    """The server ends, and waits no longer for what is under way."""


class Busy(HfBlendError):
    """More requests are under way than are admitted."""


class UnknownModelError(PromptError):
    """A request names a model that is not served."""


class FieldError(PromptError):
    """A body that is no request, and the field where it is not."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


Request = TypeVar("Request", bound=Generation)


def read_request(kind: type[Request], body: bytes, limits: Limits) -> tuple[Request, dict[str, Any]]:
    """Return the fields of a request, and its body as it came; raises `FieldError` if it is not a valid request."""
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise FieldError(None, "the body is nested too deeply. Send lists and objects of fewer levels.") from error
    except ValueError as error:  # bytes that are no text, too, and numbers of thousands of digits
        raise FieldError(None, f"the body is no JSON: {error}. Correct it.") from error
    if not isinstance(fields, dict):
        raise FieldError(None, f"the body is {reprlib.repr(fields)}, expected an object of JSON. Send one.")
    _check_counts(fields, limits)
    _check_levels(fields)
    try:
        return kind.model_validate(fields), fields
    except ValidationError as error:
        raise FieldError(*described(error.errors(include_url=False))) from error


def _check_counts(body: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a body with more rows than are taken before any of them is looked at."""
    lists = {name: value for name, value in body.items() if isinstance(value, list)}
    for name in ("documents", "messages", "tools"):
        check_count(name, len(lists.get(name, ())), getattr(limits, name))
    messages = [message for message in lists.get("messages", ()) if isinstance(message, dict)]
    contents = [message.get(name) for message in messages for name in ("content", "tool_calls")]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    check_count("parts of messages and tool calls", parts, limits.parts)
    if (stops := len(lists.get("stop", ()))) > limits.stops:
        raise FieldError("stop", f"stop has {stops} texts, expected at most {limits.stops}, none empty.")
    prompts = lists.get("prompt")
    if prompts and not isinstance(prompts[0], int):
        check_count("answers", len(prompts), limits.choices)
    biases = body.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > MOST_BIASES:
        raise FieldError("logit_bias", f"logit_bias is of {len(biases)} tokens, expected at most {MOST_BIASES}.")


def _check_levels(fields: Any) -> None:
    """Refuse what is nested too deeply for chat templates and libraries that read it later."""
    level = [fields]
    for _ in range(MOST_LEVELS):
        values = (value for row in level for value in (row.values() if isinstance(row, dict) else row))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise FieldError(None, f"the body is nested deeper than {MOST_LEVELS} levels. Send fewer.")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def described(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the field of the innermost error, and a sentence: what came there, what was expected, and what to do."""
    first: Any = max(errors, key=lambda error: (_field(error) or "").count("."))
    param = _field(first)
    unknown = first.get("ctx", {}).get("error")
    if isinstance(unknown, UnknownField):
        advice = f"Write {unknown.near}, or leave it out." if unknown.near else "Leave it out."
        param = ".".join(filter(None, (param, unknown.name)))
        return param, f"{param} is no field of this request. {advice}"
    if first["type"] == "union_tag_invalid":
        came, tags = first["ctx"]["tag"], first["ctx"]["expected_tags"]
        return f"{param}.type", f"{param}.type is {came!r:.40}, expected one of {tags}. Correct it, or leave it out."
    if first["type"] == "missing":
        return param, f"{param or 'the body'} is missing, expected a value. Send it."
    own = (error["msg"] for error in errors if _field(error) == param)
    texts = (re.sub("^(Value error, |Input should be )", "", text) for text in own)
    expected, came = " or ".join(dict.fromkeys(texts)), reprlib.repr(first["input"])
    return param, f"{param or 'the body'} is {came}, expected {expected}. Correct it, or leave it out."


def _field(error: Mapping[str, Any]) -> str | None:
    """Return the path of the field with an error, without the types that pydantic tried there."""
    names = [str(name) for name in error["loc"] if isinstance(name, int) or not TYPE.fullmatch(name)]
    return PART.sub(r"\1", ".".join(names)) or None


def check_count(what: str, count: int, most: int) -> None:
    """Refuse more than is taken."""
    if count > most:
        raise PromptError(f"{count} {what} came, at most {most} are taken. Send fewer.")


def check_chars(what: str, value: Any, limits: Limits) -> None:
    """Refuse a schema that is too long to be compiled."""
    chars = len(json.dumps(value))
    if chars > limits.schema_chars:
        raise PromptError(f"{what} has {chars} characters of JSON, expected at most {limits.schema_chars}. Send less.")


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error as OpenAI's clients read it."""
    error = {"message": _printable(message), "type": kind, "code": code, "param": param and _printable(param)}
    return {"error": error}


def _printable(text: str) -> str:
    """Shorten a text, and escape halves of surrogate pairs, which UTF-8 cannot encode."""
    short = text if len(text) <= MOST_CHARS else f"{text[: MOST_CHARS - 1]}…"
    return short.encode("utf-8", "backslashreplace").decode()
