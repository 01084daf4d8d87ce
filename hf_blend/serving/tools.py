# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tools: whether a chat template writes them, and the calls in an answer."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import PromptError
from ..prompt.messages import render

__all__ = ["Parts", "check_rendered"]

HERMES = {  # for tokenizers without a response template: calls are <tool_call>{"name": …}</tool_call>
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def check_rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: Mapping[str, Any],
    render: Callable[..., str] = render,
) -> None:
    """Refuse fields of messages, and tools, that a chat template would silently leave out."""
    rows = list[tuple[str, Any, Any]]()
    for name in ("name", "tool_calls"):
        first = next((number for number, message in enumerate(messages) if name in message), None)
        less = [{key: value for key, value in row.items() if key != name} for row in messages]
        rows += [] if first is None else [(f"messages.{first}.{name}", less, template)]
    if template.get("tools"):
        rows.append(("tools", messages, {**template, "tools": None}))
    if not rows:
        return
    has_template = getattr(tokenizer, "chat_template", None) is not None
    rendered = render(tokenizer, messages, **template) if has_template else ""
    for what, chat, arguments in rows:
        if not has_template or render(tokenizer, chat, **arguments) == rendered:
            raise PromptError(
                f"{what} came, but the model's chat template leaves that out: the model would not see it. Leave it "
                "out, or serve a model whose template has it."
            )


class Parts:
    """Cuts an answer, as it grows, into text, reasoning and calls, each as OpenAI's `delta` has it."""

    def __init__(self, tokenizer: Any, prompt: str, tools: Sequence[Mapping[str, Any]], is_forced: bool) -> None:
        self._is_forced, self._calls, self._unsent = is_forced, 0, ""
        self._parser: Any = None
        if tools and not is_forced:
            own = getattr(tokenizer, "response_template", None)
            prefix = prompt if own else ""
            self._parser = tokenizer.get_response_parser(own or HERMES, prefix=prefix, tools=list(tools))

    @property
    def has_calls(self) -> bool:
        """Whether the model called a tool."""
        return self._calls > 0

    def feed(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Return the new parts."""
        self._unsent += text
        if self._is_forced:  # a call alone, which the grammar wrote
            return self._call_or_text() if is_last else []
        if self._parser is None:
            return self._rest()
        try:
            events = self._parser.feed(text)
            events += self._parser.finalize()[1] if is_last else []
            return [delta for event in events for delta in self._delta(event)]
        except ValueError:  # it is no call, after all
            self._parser = None
            return self._rest()

    def _delta(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        field, kind = event.get("field"), event["type"]
        if kind == "region_close" and field == "tool_calls":
            call = self._call(event["value"]["function"])
            self._unsent = ""
            return [call]
        if kind == "region_chunk" and not event.get("dirty") and event.get("text"):
            self._unsent = self._unsent[len(event["text"]) :]
            name = "content" if field == "content" else "reasoning_content"
            return [{name: event["text"]}]
        return []

    def _call(self, function: Any) -> dict[str, Any]:
        if not isinstance(function, dict):
            raise ValueError(f"{function!r:.40} is no call")
        name, arguments = function.get("name"), function.get("arguments", function.get("parameters", {}))
        if not isinstance(name, str) or not name:
            raise ValueError("a call without a name")
        if not isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict):
            raise ValueError(f"{arguments!r:.40} are no arguments")  # no request could hold them
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._calls += 1
        call = {"index": self._calls - 1, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": name, "arguments": text}}]}

    def _call_or_text(self) -> list[dict[str, Any]]:
        try:
            return [self._call(json.loads(self._unsent))]
        except ValueError:  # cut off
            return self._rest()

    def _rest(self) -> list[dict[str, Any]]:
        text, self._unsent = self._unsent, ""
        return [{"content": text}] if text else []
