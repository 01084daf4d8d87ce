# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions over documents, answered by one method or by several side by side; what `hf-blend ask` does."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.prefill.report import BlendReport
from hf_blend.prompt.pieces import tokenize

from .answering import FULL_PREFILL, FULL_REUSE, Answer, Method, answer, is_right

INSTRUCTION = "Answer the question from the documents, in as few words as possible."
MARK = "\0"


@dataclass(frozen=True)
class Asked:
    """A question with its documents.

    Attributes:
        pieces: `prefix`, `chunks` and `question`, as `BlendCache.inputs` takes them.
        question: as the user wrote it.
        wanted: the right answer, if it is known.
    """

    pieces: dict[str, Any]
    question: str
    wanted: str | None = None


@dataclass(frozen=True)
class Reply:
    """One method's answer to one question, and the prompt's tokens with those marked that were recomputed.

    Attributes:
        row: the figures, as JSON values.
        tokens: (text of a token, recomputed) for every token of the chunks.
        answer: all that is known about the answer.
    """

    row: dict[str, Any]
    tokens: list[tuple[str, bool]]
    answer: Answer


def methods(config: BlendConfig, compare: bool) -> list[Method]:
    """Blending, and beside it the two ends of the scale if they are compared."""
    blend = Method("blend", config)
    return [FULL_PREFILL, FULL_REUSE, blend] if compare else [blend]


def warm(model: nn.Module, tokenizer: Any, store: ChunkStore, asked: Asked, method: Method) -> BlendReport | None:
    """Answer once without looking at the time, so that every chunk is stored and the model is known.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        store: receives the chunks.
        asked: the question.
        method: how to answer.

    Returns:
        What it cost, the chunks computed among it.
    """
    return answer(model, tokenizer, store, method, asked.pieces, max_new_tokens=1).report


def ask(
    model: nn.Module,
    tokenizer: Any,
    store: ChunkStore,
    asked: Asked,
    method: Method,
    max_new_tokens: int,
    tell: Callable[[str], None] | None = None,
) -> Reply:
    """Answer one question by one method.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        store: where chunks are kept.
        asked: the question.
        method: how to answer.
        max_new_tokens: where the answer is cut.
        tell: is given the answer piece by piece.

    Returns:
        The reply.
    """
    got = answer(model, tokenizer, store, method, asked.pieces, tell, max_new_tokens)
    row = {
        "method": method.name,
        "question": asked.question,
        "answer": got.text,
        "correct": None if asked.wanted is None else is_right(got.text, asked.wanted),
        "ttft_ms": got.ttft_ms,
        "charged_budget": 1.0 if got.report is None else got.report.charged_budget,
    }
    chosen = set(got.report.chosen_columns[0]) if got.report and got.report.chosen_columns else set()
    asked_tokens = len(tokenize(tokenizer, asked.pieces["question"]))
    ids = got.input_ids.tolist()
    tokens = [
        (tokenizer.decode([token]), place in chosen) for place, token in enumerate(ids[: len(ids) - asked_tokens])
    ]
    return Reply(row, tokens, got)


def split(tokenizer: Any, text: str, chunk_tokens: int) -> list[list[int]]:
    """Cut a document into chunks of equal length, the last one shorter.

    Args:
        tokenizer: the model's.
        text: the document.
        chunk_tokens: length of a chunk.

    Returns:
        Token ids of each chunk.
    """
    ids = list(tokenize(tokenizer, text))
    return [ids[start : start + chunk_tokens] for start in range(0, len(ids), chunk_tokens)]


def read_documents(names: Sequence[str], stdin: Iterable[str]) -> list[str]:
    """Read documents from files, or from standard input where a name is `-`.

    Args:
        names: paths.
        stdin: lines of standard input.

    Returns:
        The texts, in the order of the names.

    Raises:
        PromptError: a file cannot be read as text.
    """
    return ["".join(stdin) if name == "-" else _read(Path(name)) for name in names]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the document {str(path)!r} cannot be read as text: {error}. Give a text file.") from error


def pieces(tokenizer: Any, chunks: Sequence[Any], question: str, system: str | None) -> dict[str, Any]:
    """Put a question and its chunks into the model's own form of a prompt.

    A tokenizer with a chat template gets it: what the template puts before the documents is the prefix, what it puts
    behind them the end of the question. Without one the question simply follows the documents.

    Args:
        tokenizer: the model's.
        chunks: text or token ids.
        question: the question.
        system: instruction before the documents; None is a short one of ours for chat models, nothing for others.

    Returns:
        `prefix`, `chunks` and `question`, as `BlendCache.inputs` takes them.
    """
    if not getattr(tokenizer, "chat_template", None):
        return {"prefix": system or None, "chunks": list(chunks), "question": question}
    content = f"{INSTRUCTION if system is None else system}\n\n{MARK}\n\nQuestion: {question}"
    turn = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, after = text.split(MARK)
    return {"prefix": tokenize(tokenizer, before), "chunks": list(chunks), "question": tokenize(tokenizer, after)}
