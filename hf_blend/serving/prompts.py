# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request becomes: messages or a text with all documents in it."""

from dataclasses import dataclass
from typing import Any

from ..cache.blend_cache import BlendCache
from ..errors import PromptError
from ..prompt.messages import text_with_documents, with_documents
from .wire import TOO_LONG, ChatRequest, CompletionRequest, Refused

__all__ = ["Input", "make_input"]

MOST_CHARS_PER_TOKEN = 16  # a text with more is refused before it is tokenised


@dataclass(frozen=True)
class ChatInput:
    """Messages with all documents in them."""

    messages: list[dict[str, str]]
    documents: list[str]

    @property
    def characters(self) -> int:
        """How long the text is, without what a template writes."""
        return sum(len(message["content"]) for message in self.messages)

    def arguments(self, cache: BlendCache, tokenizer: Any) -> dict[str, Any]:
        """Return the arguments of `generate`; a last message of the assistant is continued."""
        template = {"continue_final_message": True} if self.messages[-1]["role"] == "assistant" else {}
        return {**cache.inputs_from_messages(tokenizer, self.messages, self.documents, **template)}

    def continues(self, earlier: "Input") -> bool:
        """Whether this is a later turn of a conversation."""
        if not isinstance(earlier, ChatInput):
            return False
        begun = earlier.messages
        if begun[-1]["role"] == "assistant":  # its last message was begun by the client, and is longer now
            begun = begun[:-1]
        return len(self.messages) > len(begun) and self.messages[: len(begun)] == begun

    def shared_characters(self, earlier: "Input") -> int:
        """How much of an earlier request is in messages that this one has, too."""
        kept = [message for message in getattr(earlier, "messages", ()) if message in self.messages]
        return sum(len(message["content"]) for message in kept)


@dataclass(frozen=True)
class TextInput:
    """A text with all documents in it."""

    text: str
    documents: list[str]

    @property
    def characters(self) -> int:
        """How long the text is."""
        return len(self.text)

    def arguments(self, cache: BlendCache, tokenizer: Any) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        return {**cache.inputs_from_text(tokenizer, self.text, self.documents)}

    def continues(self, earlier: "Input") -> bool:
        """Whether this text begins with an earlier one."""
        if not isinstance(earlier, TextInput):
            return False
        return len(self.text) > len(earlier.text) and self.text.startswith(earlier.text)

    def shared_characters(self, earlier: "Input") -> int:
        """A text is continued or another one."""
        return 0


Input = ChatInput | TextInput


def make_input(request: ChatRequest | CompletionRequest, tokens: int) -> Input:
    """Put the documents of a request into its messages or its text; refuse what cannot fit before it is tokenised."""
    made: Input
    try:
        if isinstance(request, ChatRequest):
            messages = [{"role": message.role, "content": message.text} for message in request.messages]
            made = ChatInput(*with_documents(messages, request.documents))
        else:
            made = TextInput(*text_with_documents(request.prompt, request.documents))
    except PromptError as error:
        raise Refused(str(error), "documents") from error
    most = MOST_CHARS_PER_TOKEN * tokens
    if made.characters > most:
        text = f"the prompt has {made.characters} characters, expected at most {most}. Shorten it."
        raise Refused(text, request.TEXT, code=TOO_LONG)
    return made
