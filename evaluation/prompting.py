# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A question and its documents as the prompt of a model: messages where it has a chat template, pieces where not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding

from hf_blend import BlendCache
from hf_blend.errors import PromptError
from hf_blend.prompt.messages import build_messages, render
from hf_blend.prompt.pieces import build

__all__ = ["Turn", "chunks_of", "documents_end", "ids_of", "inputs_of", "request"]

INSTRUCTION = "Answer the question from the documents, in as few words as possible."


@dataclass(frozen=True)
class Turn:
    """A question and its answer, earlier in a conversation."""

    question: str
    answer: str


def request(
    tokenizer: Any, chunks: Sequence[Any], question: str, system: str | None, history: Sequence[Turn] = ()
) -> dict[str, Any]:
    """Put a question and its chunks into the model's own form of a prompt.

    The documents are in the first turn, so that what precedes them is the same in every turn and is stored once.
    """
    if not getattr(tokenizer, "chat_template", None):
        said = "".join(f"Question: {turn.question}\nAnswer: {turn.answer}\n" for turn in history)
        asked = f"{said}Question: {question}\nAnswer:" if history else question
        return {"prefix": system or None, "chunks": list(chunks), "question": asked}
    texts = [chunk if isinstance(chunk, str) else tokenizer.decode(chunk) for chunk in chunks]
    told = INSTRUCTION if system is None else system
    has_system = bool(told) and _has_system_role(tokenizer, told)
    questions = [*(turn.question for turn in history), question]
    content = f"{''.join(texts).rstrip()}\n\nQuestion: {questions[0]}"
    messages = [{"role": "system", "content": told}] if has_system else []
    messages.append({"role": "user", "content": f"{told}\n\n{content}" if told and not has_system else content})
    for turn, asked in zip(history, questions[1:], strict=True):
        messages.append({"role": "assistant", "content": turn.answer})
        messages.append({"role": "user", "content": asked})
    return {"messages": messages, "documents": [text for text in texts if text.strip()]}


def inputs_of(cache: BlendCache, tokenizer: Any, given: dict[str, Any]) -> BatchEncoding:
    """Arguments of `generate` for a request, as `request` gives it."""
    make = cache.inputs_from_messages if "messages" in given else cache.inputs
    return make(tokenizer, **given)


def ids_of(tokenizer: Any, given: dict[str, Any]) -> list[int]:
    """Token ids of a request; those that `inputs_of` gives too."""
    if "messages" in given:
        return list(build_messages(tokenizer, given["messages"], (), {}).ids)
    return list(build(tokenizer, given.get("prefix"), given["chunks"], given["question"]).ids)


def chunks_of(tokenizer: Any, given: dict[str, Any]) -> list[tuple[int, ...]]:
    """Token ids of each chunk of a request, as the store keeps them; some may be equal."""
    if "messages" in given:
        prompt = build_messages(tokenizer, given["messages"], given["documents"], {})
        return [span.token_ids for span in prompt.spans()]
    return list(build(tokenizer, given.get("prefix"), given["chunks"], given["question"]).chunks)


def documents_end(tokenizer: Any, given: dict[str, Any]) -> int:
    """How many of the tokens of a request stand before the question."""
    if "messages" in given:
        spans = build_messages(tokenizer, given["messages"], given["documents"], {}).spans()
        return spans[-1].stop if spans else 0
    return build(tokenizer, given.get("prefix"), given["chunks"], given["question"]).spans()[-1].stop


def _has_system_role(tokenizer: Any, told: str) -> bool:
    """Whether the chat template writes a system message; some refuse one, some leave it out."""
    turns = [{"role": "system", "content": told}, {"role": "user", "content": "?"}]
    try:
        return told in render(tokenizer, turns)
    except PromptError:
        return False
