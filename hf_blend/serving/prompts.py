# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request becomes: messages or a text with all documents in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.blend_cache import BlendCache
from ..prompt.documents import absent, leave_out_empty, texts_of
from .wire import ChatRequest, CompletionRequest, Refused

__all__ = ["Prompt", "make_prompt"]

MOST_CHARS_PER_TOKEN = 16  # a text with more is refused before it is tokenised


@dataclass(frozen=True)
class ChatPrompt:
    """Messages with all documents in them."""

    messages: list[dict[str, str]]
    documents: list[str]

    @classmethod
    def of(cls, request: ChatRequest) -> "ChatPrompt":
        """Put documents that are in no message before the first message of the user.

        There they stay from turn to turn: a conversation that is sent again with the same documents begins as before.
        """
        messages = [{"role": message.role, "content": message.text} for message in request.messages]
        documents, missing = _split(request.documents, [message["content"] for message in messages])
        if missing:
            first = next(message for message in messages if message["role"] == "user")
            first["content"] = "\n\n".join([*missing, first["content"]])
        return cls(messages, documents)

    @property
    def characters(self) -> int:
        """How long the text is, without what a template writes."""
        return sum(len(message["content"]) for message in self.messages)

    def inputs(self, cache: BlendCache, tokenizer: Any, history: Any) -> dict[str, Any]:
        """Return the arguments of `generate`; a last message of the assistant is continued."""
        template = {"continue_final_message": True} if self.messages[-1]["role"] == "assistant" else {}
        return {**cache.inputs_from_messages(tokenizer, self.messages, self.documents, history=history, **template)}

    def continues(self, earlier: "Prompt") -> bool:
        """Whether this is a later turn of a conversation."""
        if not isinstance(earlier, ChatPrompt):
            return False
        begun = earlier.messages
        if begun[-1]["role"] == "assistant":  # its last message was begun by the client, and is longer now
            begun = begun[:-1]
        return len(self.messages) > len(begun) and self.messages[: len(begun)] == begun


@dataclass(frozen=True)
class TextPrompt:
    """A text with all documents in it."""

    text: str
    documents: list[str]

    @classmethod
    def of(cls, request: CompletionRequest) -> "TextPrompt":
        """Put documents that are not in the text before it."""
        documents, missing = _split(request.documents, [request.prompt])
        return cls("\n\n".join([*missing, request.prompt]), documents)

    @property
    def characters(self) -> int:
        """How long the text is."""
        return len(self.text)

    def inputs(self, cache: BlendCache, tokenizer: Any, history: Any) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        return {**cache.inputs_from_text(tokenizer, self.text, self.documents, history=history)}

    def continues(self, earlier: "Prompt") -> bool:
        """Whether this text begins with an earlier one."""
        return (
            isinstance(earlier, TextPrompt)
            and len(self.text) > len(earlier.text)
            and self.text.startswith(earlier.text)
        )


Prompt = ChatPrompt | TextPrompt


def make_prompt(request: ChatRequest | CompletionRequest, tokens: int) -> Prompt:
    """Put the documents of a request into its messages or its text; refuse what cannot fit before it is tokenised."""
    prompt: Prompt = ChatPrompt.of(request) if isinstance(request, ChatRequest) else TextPrompt.of(request)
    most = MOST_CHARS_PER_TOKEN * tokens
    if prompt.characters > most:
        raise Refused(f"the prompt has {prompt.characters} characters, expected at most {most}. Shorten it.")
    return prompt


def _split(documents: Sequence[Any], contents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts of all documents, and of those that are in no content, without white space at their ends."""
    filled, _ = leave_out_empty(documents)
    texts = texts_of(filled, contents)
    missing = [text.rstrip() for text in absent(texts, contents)]
    return list(dict.fromkeys(texts)), list(dict.fromkeys(missing))
