# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a command is given to read: files, folders, JSONL, standard input; and whether a model knows its words."""

from collections.abc import Iterable, Sequence
from typing import Any

from hf_blend.prompt.pieces import tokenize

from .asking import read_documents
from .indexing import Corpus

UNKNOWN_SHARE = 0.2  # of the words, from which on it is said


def gather(names: Sequence[str], stdin: Iterable[str]) -> list[str]:
    """Read documents, folders as `hf-blend index` reads them.

    Args:
        names: paths; `-` is standard input.
        stdin: lines of standard input.

    Returns:
        The texts, in the order of the names.

    Raises:
        PromptError: a path does not exist, is no text, or is a folder without any.
    """
    return [text for name in names for text in (read_documents([name], stdin) if name == "-" else Corpus([name]))]


def unknown_words(tokenizer: Any, text: str) -> str:
    """Say so if many words of a text are unknown to a tokenizer; else nothing.

    Args:
        tokenizer: the model's.
        text: documents and question.

    Returns:
        A sentence, or "".
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = tokenize(tokenizer, text) if unknown is not None else ()
    share = sum(token == unknown for token in ids) / max(1, len(ids))
    if share < UNKNOWN_SHARE:
        return ""
    return (
        f"This model knows {len(tokenizer)} words, and {share:.0%} of yours are not among them: its answers mean "
        "nothing here."
    )
