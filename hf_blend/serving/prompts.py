# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts of requests: messages through the model's chat template, or text, with the documents in them.

What a template may write is counted before it is rendered, and what it wrote is counted before it is tokenized.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import PromptError
from ..prompt.documents import absent, leave_out_empty, texts_of
from ..prompt.messages import build_messages, content_of, plain_messages
from ..prompt.pieces import Span, TextPrompt, tokenize
from ..prompt.text import build_text
from ..prompt.tokenizer import front_ids
from .rendering import Renderer
from .tools import check_rendered

__all__ = [
    "MARK", "PicturePrompt", "chat_prompt", "check_arguments", "check_chat", "check_text_prompt", "is_picture",
    "parts_of", "text_prompt",
]  # fmt: skip

BETWEEN = "\n\n"
CHARS_PER_TOKEN = 8  # a text with more characters may be too long: it is tokenized part by part first
MOST_CHARS_PER_TOKEN, MOST_CHARS = 64, 1 << 20  # a text with more than both is refused, whatever a tokenizer drops
PART = 1 << 14  # characters: 5,000 tokens of prose, and 20 ms
SEAM = 64  # tokens that a part may have more than in the whole text
MARK = {"type": "image"}  # where a chat template puts an image
RESERVED = {"conversation", "messages", "self", "tokenizer"}  # beside the arguments of `apply_chat_template`


@dataclass(frozen=True)
class PicturePrompt(TextPrompt):
    """A prompt with images, and the arguments of a forward for them."""

    arguments: Mapping[str, Tensor] = field(default_factory=dict)


def parts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the content of a message as a list of parts."""
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def is_picture(item: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(item, Mapping) and item.get("type") == "image_url"


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    documents: Any,
    most: int | None = None,
    template: Mapping[str, Any] | None = None,
    tokens: int | None = None,
    eyes: Any = None,
    render_s: float | None = None,
) -> TextPrompt:
    """Make the prompt of messages with the tokenizer's chat template; a last message of the assistant is continued.

    Args:
        tokenizer: has the chat template. For messages with images it is the processor of `eyes`.
        messages: of the conversation, as dicts; at least one has the role "user".
        documents: texts, or objects with one; those in no message are put before the last message of the user.
        most: places in the prompt where documents may be; None for any number.
        template: further arguments of the chat template.
        tokens: the most tokens of the prompt; a longer text is refused before all of it is tokenized.
        eyes: reads images, an `evaluation.pictures.Eyes`; without it they are refused.
        render_s: CPU seconds that the chat template may take.
    """
    listed = _filled(documents, [content_of(message) for message in messages])
    chat = check_chat(tokenizer, messages, listed, template or {}, tokens)
    if any(is_picture(item) for message in messages for item in parts_of(message)):
        if eyes is None:
            raise PromptError("image_url came, but the model that is served reads text alone. Leave images out.")
        rendered, images = eyes.take(messages)
        renderer = eyes.processor
    else:
        rendered, images, renderer = chat, [], tokenizer
    last = next((row for row in reversed(rendered) if row.get("role") == "user"), None)
    if last is None:
        raise PromptError(f"{len(chat)} messages came, but none with role 'user' is among them. Send a question.")
    has_template = getattr(renderer, "chat_template", None) is not None
    contents = [message["content"] for message in chat]
    chunks, added = _added(listed, contents, BETWEEN if has_template else "\n")
    front = [{"type": "text", "text": added}] if images and added else []
    last["content"] = [*front, *last["content"]] if images else f"{added}{last['content']}"
    arguments = dict(template or {})
    if chat[-1]["role"] == "assistant":
        arguments["continue_final_message"] = True
    timed = Renderer(render_s)

    def render(*positional: Any, **arguments: Any) -> str:
        text = timed(*positional, **arguments)
        _check_fits(tokenizer, tokens, text)
        return text

    check_rendered(renderer, rendered, arguments, render)
    if images:
        arguments.setdefault("add_generation_prompt", "continue_final_message" not in arguments)
        prompt: TextPrompt = eyes.prompt(render(renderer, rendered, **arguments), images, chunks, most)
        return prompt
    if has_template:
        return build_messages(tokenizer, chat, chunks, arguments, most, render)
    return build_text(tokenizer, "".join(message["content"] for message in chat), chunks, special=True, most=most)


def check_arguments(renderers: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments for the chat template that `apply_chat_template` has itself, or that name a special token."""
    for source in renderers if arguments else ():
        own = {*inspect.signature(source.apply_chat_template).parameters, *getattr(source, "special_tokens_map", ())}
        reserved = sorted(arguments.keys() & (own | RESERVED))
        if reserved:
            raise PromptError(f"chat_template_kwargs has {reserved[0]!r}, which the server sets. Leave it out.")


def check_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    documents: Sequence[str],
    template: Mapping[str, Any],
    tokens: int | None,
) -> list[dict[str, Any]]:
    """Return the messages with a text as the content of each; refuse more than `tokens` of all they contain."""
    texts = [{**row, "content": [item for item in parts_of(row) if not is_picture(item)]} for row in messages]
    chat = plain_messages(texts)
    rest = [{name: value for name, value in row.items() if name not in ("role", "content")} for row in chat]
    others = [row for row in (*rest, dict(template)) if row]
    written = json.dumps(others, ensure_ascii=False, default=str) if others else ""  # as templates write it
    contents = [row["content"] for row in chat]
    _check_fits(tokenizer, tokens, *absent(documents, contents), *contents, written)
    return chat


def check_text_prompt(
    tokenizer: Any, prompt: str | Sequence[int], documents: Sequence[str], tokens: int | None
) -> None:
    """Refuse a prompt of more than `tokens`."""
    if isinstance(prompt, str):
        _check_fits(tokenizer, tokens, *absent(documents, [prompt]), prompt)
        return
    _check_fits(tokenizer, tokens, *documents)
    if tokens is not None and len(prompt) > tokens:
        raise PromptError(f"the prompt has {len(prompt)} tokens, expected at most {tokens}. Shorten it.")


def text_prompt(
    tokenizer: Any,
    prompt: str | Sequence[int],
    documents: Any,
    most: int | None = None,
    tokens: int | None = None,
) -> TextPrompt:
    """Make a prompt of text or ids; documents that are not in it are put before it."""
    texts = _filled(documents, [prompt] if isinstance(prompt, str) else [])
    check_text_prompt(tokenizer, prompt, texts, tokens)
    if isinstance(prompt, str):
        chunks, added = _added(texts, [prompt], "\n")
        return build_text(tokenizer, f"{added}{prompt}", chunks, special=True, most=most)
    return _before_ids(tokenizer, _added(texts, [], "\n")[0], tuple(map(int, prompt)))


def _filled(documents: Any, contents: Sequence[str]) -> list[str]:
    """Return the texts of documents, as the contents have them; empty ones are left out with a warning."""
    return texts_of(leave_out_empty(documents)[0], contents)


def _check_fits(tokenizer: Any, most: int | None, *texts: str) -> None:
    """Refuse texts of more than `most` tokens without tokenizing all of them: a body of megabytes takes seconds.

    The number of characters is not enough: a tokenizer may drop white space, or make one token of what it lacks.
    """
    text, count = "".join(texts), 0
    if most is None or len(text) <= CHARS_PER_TOKEN * most:
        return
    longest = max(MOST_CHARS_PER_TOKEN * most, MOST_CHARS)
    if len(text) > longest:
        raise PromptError(f"the prompt has {len(text)} characters, expected at most {longest}. Shorten it.")
    for start in range(0, len(text), PART):
        count += max(0, len(tokenize(tokenizer, text[start : start + PART])) - SEAM)
        if count > most:
            raise PromptError(
                f"the first {start + PART} of {len(text)} characters of the prompt have more than {most} tokens, "
                "expected at most so many, which the model and its cache can hold. Shorten it."
            )


def _before_ids(tokenizer: Any, documents: Sequence[str], ids: tuple[int, ...]) -> TextPrompt:
    """Make a prompt of documents, each tokenised alone, and ids behind them; a BOS of the ids is put first."""
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
    """Return the documents as they will be in the prompt, and the text of those that it lacks."""
    added = absent(documents, contents)
    if end == BETWEEN:  # white space between documents is no part of them
        return list(documents), "".join(f"{text.rstrip()}{end}" for text in added)
    ended = {text: text if text.endswith(end) else f"{text}{end}" for text in added}
    return [ended.get(text, text) for text in documents], "".join(ended[text] for text in added)
