# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tools: whether a chat template writes them, and the calls in an answer."""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

BARE = re.compile(r"\s*(```(json)?\s*)?(?P<call>\{.*\})(?(1)\s*```)\s*", re.DOTALL)
BARE_BEGINNING = re.compile(r"\s*((`{0,2}|```(j|js|jso|(json)?\s*))\Z|(```(json)?\s*)?\{)")
KINDS: dict[str, tuple[type, ...]] = {  # what Python makes of a type of JSON
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


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


def fits(value: Any, schema: Any) -> bool:
    """Say whether a value has the types, keys and choices of a schema; its patterns and references are not looked at.

    So it ends soon for any schema of a client, which a whole validator does not.
    """
    if not isinstance(schema, dict):
        return schema is not False
    kinds = schema.get("type", [])
    names = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if names and not any(_is_kind(value, name) for name in names):
        return False
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and value not in choices:
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items")) for item in value)
    if not isinstance(value, dict):
        return True
    fields, required = schema.get("properties"), schema.get("required")
    fields, others = fields if isinstance(fields, dict) else {}, schema.get("additionalProperties")
    return all(fits(item, fields.get(name, others)) for name, item in value.items()) and (
        not isinstance(required, list) or all(name in value for name in required)
    )


def _is_kind(value: Any, name: Any) -> bool:
    kinds = KINDS.get(name, (object,)) if isinstance(name, str) else (object,)
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds or object in kinds)


class Parts:
    """Cuts an answer, as it grows, into text, reasoning and calls, each as OpenAI's `delta` has it.

    Some models write a call without the marks of their template: an answer that is the JSON of a call alone is one,
    where the tool was given and the arguments fit it. What may become one is sent when it is whole.
    """

    def __init__(self, tokenizer: Any, prompt: str, tools: Sequence[Mapping[str, Any]], is_forced: bool) -> None:
        self._is_forced, self._calls, self._unsent = is_forced, 0, ""
        self._may_be_bare = bool(tools)
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
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
        if self._may_be_bare:
            if not is_last and BARE_BEGINNING.match(self._unsent):
                return []
            if is_last and (calls := self._bare_call()):
                return calls
            self._may_be_bare, text = False, self._unsent
        self._unsent = self._unsent[: len(self._unsent) - len(text)]
        return _merged(self._parse(text, is_last))

    def _parse(self, text: str, is_last: bool) -> Iterator[dict[str, Any]]:
        """Feed the parser letter by letter, so that what it gave before it failed is kept."""
        behind = text
        try:
            for number, letter in enumerate(text, 1):
                behind = text[number:]
                self._unsent += letter
                for event in self._parser.feed(letter):
                    yield from self._delta(event)
            for event in self._parser.finalize()[1] if is_last else ():
                yield from self._delta(event)
        except ValueError:  # it is no call, after all
            self._parser = None
            self._unsent += behind
            yield from self._rest()

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

    def _bare_call(self) -> list[dict[str, Any]]:
        """Return the call that all of the answer is, if it is one."""
        whole = BARE.fullmatch(self._unsent)
        try:
            function = json.loads(whole["call"]) if whole else {}
            arguments = function.get("arguments", function.get("parameters"))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            is_call = len(function) == 2 and function.get("name") in self._schemas and isinstance(arguments, dict)
            return [self._call(function)] if is_call and fits(arguments, self._schemas[function["name"]]) else []
        except (ValueError, TypeError, RecursionError):  # no JSON, or a name that is no text
            return []

    def _call(self, function: Any) -> dict[str, Any]:
        if not isinstance(function, dict):
            raise ValueError(f"{function!r:.40} is no call")
        name, arguments = function.get("name"), function.get("arguments", function.get("parameters", {}))
        if not isinstance(name, str) or not name:
            raise ValueError("a call without a name")
        if not isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict):
            raise ValueError(f"{arguments!r:.40} are no arguments")  # no request could hold them
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
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


def _merged(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same parts, neighbours of one text joined."""
    merged = list[dict[str, Any]]()
    for delta in deltas:
        name = next(iter(delta))
        if merged and name != "tool_calls" and [*merged[-1]] == [name]:
            merged[-1] = {name: merged[-1][name] + delta[name]}
        else:
            merged.append(delta)
    return merged
