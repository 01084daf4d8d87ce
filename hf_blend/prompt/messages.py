# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that are messages: the chat template is rendered once, and documents are found in its text."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PromptError
from .documents import absent, for_template, forms_of, leave_out_empty, list_documents, texts_of
from .pieces import Prompt
from .text import build_text

BETWEEN = "\n\n"
_OURS = ("tokenize", "return_tensors", "return_dict", "padding", "truncation", "max_length", "tokenizer_kwargs")


def build_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    documents: Any,
    template: Mapping[str, Any],
) -> Prompt:
    """Render messages and find the documents in the text; documents that are no texts are passed to the template."""
    _check(tokenizer, messages, template)
    listed = list_documents(documents)
    texts = []
    dicts = []
    for number, document in enumerate(listed):
        texts.append(forms_of(document, f"document {number}")[-1])
        if isinstance(document, Mapping):
            dicts.append(document)
        elif not isinstance(document, str):
            dicts.append(for_template(document))
    arguments = {"add_generation_prompt": not template.get("continue_final_message", False), **template}
    if dicts:
        arguments["documents"] = dicts
    text = render(tokenizer, messages, **arguments)
    return build_text(tokenizer, text, listed, special=False, opening=_is_opening(messages, texts))


def with_documents(messages: Sequence[Mapping[str, Any]], documents: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Put documents that are in no message before the first message of the user; returns messages and texts.

    There they stay from turn to turn: a conversation that is sent again with the same documents begins as before.
    Empty documents are left out with a warning.
    """
    plain = [{**message, "content": _plain(message)} for message in messages]
    filled, _ = leave_out_empty(documents)
    texts, missing = _split(filled, [message["content"] for message in plain])
    if missing:
        first = next((message for message in plain if message.get("role") == "user"), None)
        if first is None:
            raise PromptError(
                f"{len(missing)} documents are in none of the {len(plain)} messages, expected one of the role user, "
                "before which documents are put. Add one with the question."
            )
        first["content"] = BETWEEN.join([*missing, first["content"]])
    return plain, texts


def text_with_documents(text: str, documents: Any) -> tuple[str, list[str]]:
    """Put documents that are not in a text before it; returns the text and those of the documents."""
    filled, _ = leave_out_empty(documents)
    texts, missing = _split(filled, [text])
    return BETWEEN.join([*missing, text]), texts


def _split(documents: Sequence[Any], contents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the texts of all documents, and of those that are in no content, without white space at their ends."""
    texts = list(dict.fromkeys(texts_of(documents, contents)))
    return texts, [text.rstrip() for text in absent(texts, contents)]


def _plain(message: Mapping[str, Any]) -> str:
    """The content of a message as one text."""
    items = message.get("content") or []
    if isinstance(items, str):
        return items
    if not isinstance(items, list | tuple):
        items = [items]
    for item in items:
        if not isinstance(item, Mapping) or item.get("type") != "text" or not isinstance(item.get("text"), str):
            raise PromptError(
                f"a message of role {message.get('role')!r} has the part {item!r:.40}, which is no text. Send text "
                "alone."
            )
    return "".join(item["text"] for item in items)


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> str:
    """The text that a chat template makes of messages."""
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
    except Exception as error:  # a template is code of others and raises what it likes
        raise PromptError(
            f"the chat template refused the {len(messages)} messages: {type(error).__name__}: {error}. Give messages "
            "and arguments that apply_chat_template takes for this tokenizer."
        ) from error
    return text


def has_template(tokenizer: Any, template: Mapping[str, Any]) -> bool:
    """Whether the tokenizer or the arguments have a chat template."""
    return bool(template.get("chat_template") or getattr(tokenizer, "chat_template", None))


def _check(tokenizer: Any, messages: Any, template: Mapping[str, Any]) -> None:
    if not has_template(tokenizer, template):
        raise PromptError(
            f"{type(tokenizer).__name__} has no chat template, but messages need one. Use a chat model's tokenizer, "
            "or inputs and inputs_from_text for a model that is none."
        )
    if isinstance(messages, str | Mapping) or not len(messages):
        raise PromptError(f"messages is {messages!r:.60}, expected a list of dicts with a role and a content.")
    for name in _OURS:
        if name in template:
            raise PromptError(
                f"{name} was passed for the chat template, but the prompt is tokenised here, as [1, tokens]. Leave it "
                "out; arguments such as tools, enable_thinking or chat_template are passed on."
            )


def _is_opening(messages: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> bool:
    """Whether no answer is before the first document, so that other conversations may begin with the same text."""
    for message in messages:
        if message.get("role") not in ("system", "developer", "user"):
            return False
        if len(absent([text.strip() for text in texts], [content_of(message)])) < len(texts):
            return True
    return True


def content_of(message: Mapping[str, Any]) -> str:
    """The text of a message, which may be in parts."""
    content = message.get("content")
    items = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(item.get("text", "")) for item in items if isinstance(item, Mapping))
