# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between clients and the server: OpenAI's requests and answers, with `documents` and what was reused."""

import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import PromptError
from ..prompt.messages import build_messages, plain_messages
from ..prompt.pieces import Span, TextPrompt, tokenize
from ..prompt.text import build_text
from ..prompt.tokenizer import front_ids
from .prefills import Prefilled


@dataclass(frozen=True)
class Limits:
    """What a server takes. `docs/serving.md` has the same rows.

    Attributes:
        requests: under way or waiting, of all tenants.
        connections: of one address that carry no whole request: silent, half sent, or kept alive.
        header_s: how long a connection may carry none.
        body_bytes: of a request.
        body_s: how long its body may take to arrive.
        request_s: how long it may take altogether.
        new_tokens: where an answer is cut that names no length.
        documents: of one request, and places of its prompt where they are.
        messages: of one request.
        stops: texts at which its answer ends.
        stop_chars: of each.
        stuck_s: after so long without any progress of what is under way the server is not ready.
    """

    requests: int = 64
    connections: int = 64
    header_s: float = 20.0
    body_bytes: int = 4 << 20
    body_s: float = 20.0
    request_s: float = 300.0
    new_tokens: int = 256
    documents: int = 256
    messages: int = 1024
    stops: int = 4
    stop_chars: int = 256
    stuck_s: float = 60.0

    @property
    def inside(self) -> int:
        """Requests whose body arrives or whose answer is made; those over the limit of requests are refused."""
        return 4 * self.requests + 64


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


BETWEEN = "\n\n"


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], documents: Sequence[str], most: int | None = None
) -> TextPrompt:
    """Render messages with the tokenizer's chat template."""
    given = plain_messages(messages)
    last = next((message for message in reversed(given) if message.get("role") == "user"), None)
    if last is None:
        raise PromptError(f"{len(given)} messages came, but none with role 'user' is among them. Send a question.")
    has_template = getattr(tokenizer, "chat_template", None) is not None
    contents = [message["content"] for message in given]
    chunks, added = _added(documents, contents, BETWEEN if has_template else "\n")
    last["content"] = f"{added}{last['content']}"
    if has_template:
        return build_messages(tokenizer, given, chunks, {}, most)
    return build_text(tokenizer, "".join(message["content"] for message in given), chunks, special=True, most=most)


def text_prompt(
    tokenizer: Any, prompt: str | Sequence[int], documents: Sequence[str], most: int | None = None
) -> TextPrompt:
    """A prompt of text or ids, behind documents."""
    if isinstance(prompt, str):
        chunks, added = _added(documents, [prompt], "\n")
        return build_text(tokenizer, f"{added}{prompt}", chunks, special=True, most=most)
    return _before_ids(tokenizer, _added(documents, [], "\n")[0], tuple(map(int, prompt)))


def _before_ids(tokenizer: Any, documents: Sequence[str], ids: tuple[int, ...]) -> TextPrompt:
    """Documents, each tokenised alone, and ids behind them; a BOS of the ids goes in front of all."""
    if not (documents or ids):
        raise PromptError("the prompt has no token, but at least one is expected. Send some text.")
    before = front_ids(tokenizer) if documents else ()
    ids = ids[len(before) :] if ids[: len(before)] == before else ids
    spans, start = list[Span](), len(before)
    for document in documents:
        spans.append(Span.whole(start, tokenize(tokenizer, document)))
        start = spans[-1].stop
    whole = (*before, *(token for span in spans for token in span.token_ids), *ids)
    return TextPrompt(whole, tuple(spans), len(before))


def _added(documents: Sequence[str], contents: Sequence[str], end: str) -> tuple[list[str], str]:
    """The documents as they will be in the prompt, and the text of those that are not in it yet."""
    absent = [text for text in documents if not any(text in content for content in contents)]
    if end == BETWEEN:  # white space between documents is no part of them
        return list(documents), "".join(f"{text.rstrip()}{end}" for text in absent)
    ended = {text: text if text.endswith(end) else f"{text}{end}" for text in absent}
    return [ended.get(text, text) for text in documents], "".join(ended[text] for text in absent)
