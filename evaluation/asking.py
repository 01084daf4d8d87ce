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

from .answering import FULL_PREFILL, FULL_REUSE, Answer, Method, answer, is_right
from .prompting import documents_end


@dataclass(frozen=True)
class Asked:
    """A question with its documents.

    Attributes:
        pieces: the prompt, as `prompting.request` gives it.
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
    ids = got.input_ids.tolist()
    end = documents_end(tokenizer, asked.pieces, len(ids))
    tokens = [
        (tokenizer.decode([token]), place in chosen) for place, token in enumerate(ids[:end])
    ]
    return Reply(row, tokens, got)


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
