# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Messages of a conversation: as OpenAI's clients send them or send them back, and as chat templates read them.

A field that is in none of these models is refused by its name.
"""

import difflib
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator

Text = Annotated[str, Field(min_length=1)]
Empty: TypeAlias = Literal[""]  # of a field that is not served, the value that asks for nothing
Ignored: TypeAlias = Annotated[Any, BeforeValidator(lambda value: None)]  # changes no answer, and is not kept
Row = TypeVar("Row")
Rows: TypeAlias = Annotated[list[Row], Field(fail_fast=True)]  # a list of all errors may be ten times the body


class UnknownField(ValueError):
    """A name that is no field, and the field that was probably meant."""

    def __init__(self, name: str, near: str) -> None:
        super().__init__(name, near)
        self.name, self.near = name, near


class Fields(BaseModel):
    """Part of a request; other fields than those of the model are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Drop fields that are null, which clients send for those they leave out; refuse the first unknown field."""
        if not isinstance(values, dict):
            return values
        names = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in values.items():
            if value is not None and name not in names:
                near = difflib.get_close_matches(name[:100], names, 1)
                raise UnknownField(name, near[0] if near else "")
        return {name: value for name, value in values.items() if value is not None}


class TextPart(Fields):
    """A text in a message."""

    type: Literal["text"]
    text: str


class RefusalPart(Fields):
    """The text with which an answer refused."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(Fields):
    """Where an image is."""

    url: str
    detail: Ignored = None


class ImagePart(Fields):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


Part: TypeAlias = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """The name and arguments with which a tool was called."""

    name: Text
    arguments: dict[str, Any] | Json[dict[str, Any]]
    parsed_arguments: Ignored = None  # of a client that read them itself

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it."""
        return {"name": self.name, "arguments": self.arguments}


class ToolCall(Fields):
    """A call in an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    index: Ignored = None
    function: FunctionCall


class Message(Fields):
    """A message of a conversation. An answer of the server is one, too, and may come back as it was written."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Rows[Part] | None = None
    name: str = ""
    tool_calls: Rows[ToolCall] = []
    tool_call_id: str = ""
    refusal: str = ""  # said in place of a content
    reasoning_content: str = ""
    reasoning: str = ""  # its name in answers of vLLM
    annotations: Ignored = None  # of the text; no template has them
    parsed: Ignored = None  # of a client that read the content itself
    audio: Empty = ""
    function_call: Empty = ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: without empty fields, and with a refusal as its content."""
        calls = [
            {"id": call.id, "type": call.type, "function": call.function.for_template()} for call in self.tool_calls
        ]
        content: Any = self.content or self.refusal or self.content
        if isinstance(content, list):
            content = [_for_template(item) for item in content]
        fields = {
            "name": self.name,
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {"role": self.role, "content": content, **{name: value for name, value in fields.items() if value}}


def _for_template(item: Any) -> dict[str, Any]:
    if isinstance(item, RefusalPart):
        return {"type": "text", "text": item.refusal}
    written: dict[str, Any] = item.model_dump(exclude_unset=True)
    return written
