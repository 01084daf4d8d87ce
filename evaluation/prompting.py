# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A question and its documents as the prompt of a model: messages where it has a chat template, pieces where not."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from hf_blend import BlendCache
from hf_blend.errors import PromptError
from hf_blend.prompt.messages import build_messages, render
from hf_blend.prompt.pieces import build, tokenize

__all__ = ["documents_end", "ids_of", "inputs_of", "request", "split"]

INSTRUCTION = "Answer the question from the documents, in as few words as possible."


def request(tokenizer: Any, chunks: Sequence[Any], question: str, system: str | None) -> dict[str, Any]:
    """Put a question and its chunks into the model's own form of a prompt.

    Args:
        tokenizer: the model's.
        chunks: text or token ids; text for a tokenizer with a chat template.
        question: the question.
        system: instruction before the documents; None is a short one of ours for chat models, nothing for others.

    Returns:
        Arguments of `BlendCache.inputs_from_messages` if the tokenizer has a chat template, of `BlendCache.inputs` if
        not.
    """
    if not getattr(tokenizer, "chat_template", None):
        return {"prefix": system or None, "chunks": list(chunks), "question": question}
    texts = [chunk if isinstance(chunk, str) else tokenizer.decode(chunk) for chunk in chunks]
    told = INSTRUCTION if system is None else system
    content = f"{''.join(texts).rstrip()}\n\nQuestion: {question}"
    asked = {"role": "user", "content": f"{told}\n\n{content}" if told else content}
    if told and _has_system_role(tokenizer, told):
        messages = [{"role": "system", "content": told}, {"role": "user", "content": content}]
    else:
        messages = [asked]
    return {"messages": messages, "documents": [text for text in texts if text.strip()]}


def inputs_of(cache: BlendCache, tokenizer: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments of `generate` for a request, as `request` gives it."""
    make = cache.inputs_from_messages if "messages" in given else cache.inputs
    return make(tokenizer, **given)


def ids_of(tokenizer: Any, given: dict[str, Any]) -> list[int]:
    """Token ids of a request; those that `inputs_of` gives too."""
    if "messages" in given:
        return list(build_messages(tokenizer, given["messages"], (), {}).ids)
    return list(build(tokenizer, given.get("prefix"), given["chunks"], given["question"]).ids)


def documents_end(tokenizer: Any, given: dict[str, Any], tokens: int) -> int:
    """How many of the `tokens` tokens of a request stand before the question."""
    if "messages" in given:
        spans = build_messages(tokenizer, given["messages"], given["documents"], {}).spans()
        return spans[-1].stop if spans else 0
    return tokens - len(tokenize(tokenizer, given["question"]))


def split(tokenizer: Any, text: str, chunk_tokens: int) -> list[Any]:
    """Cut a document into chunks of equal length, the last one shorter.

    Args:
        tokenizer: the model's.
        text: the document.
        chunk_tokens: length of a chunk.

    Returns:
        Texts for a tokenizer with a chat template, whose prompts are tokenised as a whole; else token ids.
    """
    ids = list(tokenize(tokenizer, text))
    starts = range(0, len(ids), chunk_tokens)
    if not getattr(tokenizer, "chat_template", None):
        return [ids[start : start + chunk_tokens] for start in starts]
    if not getattr(tokenizer, "is_fast", False):
        return [tokenizer.decode(ids[start : start + chunk_tokens]) for start in starts]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    edges = [0, *(offsets[start][0] for start in starts[1:]), len(text)]
    return [text[start:stop] for start, stop in pairwise(edges) if start < stop]


def _has_system_role(tokenizer: Any, told: str) -> bool:
    """Whether the chat template writes a system message; some refuse one, some leave it out."""
    turns = [{"role": "system", "content": told}, {"role": "user", "content": "?"}]
    try:
        return told in render(tokenizer, turns)
    except PromptError:
        return False
