# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""From what clients send to token ids: a prompt, and which runs of it are chunks.

The server asks these functions and nothing else for its prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PromptError
from ..prompt.pieces import tokenize

__all__ = ["ServedPrompt", "chat_prompt", "text_prompt"]

BETWEEN = "\n\n"


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt to serve.

    Attributes:
        ids: its tokens.
        chunks: token ids of the chunks in it, in their order.
    """

    ids: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...] = ()


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], documents: Sequence[str]) -> ServedPrompt:
    """Render messages with the tokenizer's chat template.

    Args:
        tokenizer: of the model. Without a template the contents follow each other.
        messages: with `role` and `content`, as in OpenAI's API.
        documents: texts. Those that no message holds are put before the last message of the user.

    Returns:
        The prompt; each document in it is a chunk.

    Raises:
        PromptError: there is no message of the user, or the template refuses the messages.
    """
    given = [{**message, "content": _content(message)} for message in messages]
    if not any(message.get("role") == "user" for message in given):
        raise PromptError(f"{len(given)} messages came, but none with role 'user' is among them. Send a question.")
    absent = [text for text in documents if not any(text in message["content"] for message in given)]
    if getattr(tokenizer, "chat_template", None) is None:
        last = given.pop()
        before = "".join(message["content"] for message in given)
        return _joined(tokenizer, [before, *_with_ends(absent, "\n"), last["content"]], documents)
    if absent:
        last = next(message for message in reversed(given) if message.get("role") == "user")
        last["content"] = "".join([*_with_ends(absent, BETWEEN), last["content"]])
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise PromptError(f"the chat template refuses these {len(given)} messages: {error}. Send others.") from error
    return _joined(tokenizer, [text], documents, bos=False)


def text_prompt(tokenizer: Any, prompt: str | Sequence[int], documents: Sequence[str]) -> ServedPrompt:
    """A prompt of text or ids, behind documents.

    Args:
        tokenizer: of the model.
        prompt: text, or token ids that are taken as they are.
        documents: texts. Those that the prompt does not hold are put before it.

    Returns:
        The prompt; each document in it is a chunk.
    """
    if not isinstance(prompt, str):
        ids = tuple(map(int, prompt))
        whole = _joined(tokenizer, [*_with_ends(documents, "\n"), ids], documents)
        return whole if documents else ServedPrompt(ids)
    absent = [text for text in documents if text not in prompt]
    return _joined(tokenizer, [*_with_ends(absent, "\n"), prompt], documents)


def _joined(
    tokenizer: Any, pieces: Sequence[str | Sequence[int]], documents: Sequence[str], bos: bool = True
) -> ServedPrompt:
    """Tokenise pieces one by one; text that is a document is a piece of its own wherever it is."""
    begin = getattr(tokenizer, "bos_token_id", None)
    ids: list[int] = [begin] if bos and begin is not None else []
    chunks = []
    for piece in pieces:
        for part, is_chunk in _parts(piece, documents):
            tokens = tokenize(tokenizer, part)
            ids.extend(tokens)
            if is_chunk and tokens:
                chunks.append(tokens)
    if not ids:
        raise PromptError("the prompt has no token, but at least one is expected. Send some text.")
    return ServedPrompt(tuple(ids), tuple(chunks))


def _parts(piece: str | Sequence[int], documents: Sequence[str]) -> list[tuple[str | Sequence[int], bool]]:
    """A piece of text, cut where documents begin and end; a line's end behind one belongs to it."""
    if not isinstance(piece, str):
        return [(piece, False)]
    found = min(((piece.find(text), -len(text)) for text in documents if text and text in piece), default=None)
    if found is None:
        return [(piece, False)] if piece else []
    start, stop = found[0], found[0] - found[1]
    stop += piece.startswith("\n", stop)
    before: list[tuple[str | Sequence[int], bool]] = [(piece[:start], False)] if start else []
    return [*before, (piece[start:stop], True), *_parts(piece[stop:], documents)]


def _with_ends(texts: Sequence[str], end: str) -> list[str]:
    return [text if text.endswith(end) else f"{text}{end}" for text in texts]


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message, which may be in parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise PromptError(f"a message of role {message.get('role')!r} has parts that are no text. Send text alone.")
    return "".join(str(part.get("text", "")) for part in parts)
