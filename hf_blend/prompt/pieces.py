# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts from pieces, which are tokenised one by one and joined as ids, never as text; and digests of tokenizers.

Tokenising the joined text would merge tokens across the seams, so that stored chunks would not be found.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..errors import PromptError, PromptLengthError
from ..rotary.base import stretches
from .documents import EXPECTED, is_list, list_documents, text_of

Piece = str | Sequence[int]
SEPARATOR = "\n\n"
SAMPLED = 1024  # words of a vocabulary, about: to sort all of it takes as long as a short prompt
UNKNOWN = -1  # id of a token that came as an embedding, or in a forward that no hook saw
# letters, digits, white space, marks and scripts that tokenizers treat apart
_PROBE = "The cats' 2026 naïve  test,\n\n\tline — 日本語 🙂 Привет مرحبا <|im_end|> </s> [INST] don't\r\n "

_known: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


class Span(NamedTuple):
    """A run of the prompt that is a chunk, or the part of a chunk that has the same tokens in the prompt."""

    start: int
    token_ids: tuple[int, ...]
    first: int
    tokens: int

    @classmethod
    def whole(cls, start: int, token_ids: Sequence[int]) -> "Span":
        """The span of a whole chunk."""
        return cls(start, tuple(token_ids), 0, len(token_ids))

    @property
    def stop(self) -> int:
        """The index in the prompt behind its last token."""
        return self.start + self.tokens

    def overlaps(self, other: "Span") -> bool:
        """Whether a token of the prompt belongs to both."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Prompt:
    """One request as token ids.

    Attributes:
        ids: all of them.
        spans: where chunks are, from left to right.
        opening: how many first ids are an entry of their own; None: all before the first chunk.
        is_searched: stored chunks are searched for besides `spans`.
    """

    ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    opening: int | None = 0
    is_searched: bool = False

    @classmethod
    def of_pieces(
        cls,
        prefix: Sequence[int],
        chunks: Sequence[Sequence[int]],
        question: Sequence[int],
        separators: Sequence[Sequence[int]] = (),
    ) -> "Prompt":
        """Join pieces; `separators` are the ids between each chunk and the next, none if there are no such."""
        ids = [*prefix]
        spans = []
        for number, chunk in enumerate(chunks):
            if number and separators:
                ids += separators[number - 1]
            spans.append(Span.whole(len(ids), chunk))
            ids += chunk
        return cls((*ids, *question), tuple(spans), None)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each chunk."""
        return tuple(span.token_ids for span in self.spans)

    @property
    def prefix(self) -> tuple[int, ...]:
        """The ids before the first chunk."""
        return self.ids[: self.spans[0].start]

    @property
    def question(self) -> tuple[int, ...]:
        """The ids behind the last chunk."""
        return self.ids[self.spans[-1].stop :]


def find_continued(
    prompts: Sequence[Prompt], rows: Sequence[Sequence[int]], before: Sequence[int]
) -> list[Prompt] | None:
    """The prompt that each row of token ids continues, behind `before` tokens of it; None if a row continues none.

    A row is the rest of its prompt, or a slice of the rest in a chunked prefill; assisted decoding appends its
    candidates. A beam search repeats prompts.
    """
    repeats, odd = divmod(len(rows), len(prompts))
    longest_first = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    found = []
    for number, (row, start) in enumerate(zip(rows, before, strict=True)):
        candidates = []
        if not odd:
            candidates.append(prompts[number // repeats])
        if start == 0:
            candidates += [prompt for prompt in longest_first if len(prompt.ids) <= len(row)]
        for prompt in candidates:
            rest = prompt.ids[start : start + len(row)]
            is_behind = start > len(prompt.ids) or (row and not rest)
            if not is_behind and tuple(row[: len(rest)]) == rest:
                found.append(prompt)
                break
        else:
            return None
    return found


def check_text(text: str) -> None:
    """Refuse text that no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the text {text[max(0, error.start - 20) : error.end]!r} has the character {text[error.start]!r} at "
            f"{error.start}, which is half of a surrogate pair and no character of its own. Read files with the right "
            "encoding, or text.encode(errors='replace').decode()."
        ) from error


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of what tells tokenizers apart: size, a sample of the vocabulary, and the ids of a line of text."""
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    size = len(tokenizer)
    cached = _known.get(tokenizer)
    if cached is not None and cached[0] == size:
        return cached[1]
    made = tokenizer.encode(_PROBE, add_special_tokens=False)
    step = max(1, size // SAMPLED)
    sample = sorted(item for item in tokenizer.get_vocab().items() if item[1] % step == 0)
    content = json.dumps([size, sample, list(made)])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    _known[tokenizer] = size, digest
    return digest


def front_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text, such as BOS; it may put none."""
    if tokenizer is None:
        return ()
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    made = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(made)):
        if made[start : start + len(bare)] == bare:
            return tuple(made[:start])
    return ()


def inner_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a text between two others; at the edge of a text, white space may have other tokens."""
    edge = list(tokenizer.encode("a", add_special_tokens=False))
    made = list(tokenizer.encode(f"a{text}a", add_special_tokens=False))
    stop = len(made) - len(edge)
    if made[: len(edge)] == edge == made[stop:]:
        return tuple(made[len(edge) : stop])
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def tokenize(tokenizer: Any, piece: Piece) -> tuple[int, ...]:
    """Token ids of one piece, nothing added before or behind it."""
    if isinstance(piece, str):
        check_text(piece)
        if tokenizer is None:
            raise PromptError(f"the text {piece[:40]!r} came without a tokenizer. Pass it, or give token ids.")
        return tuple(tokenizer.encode(piece, add_special_tokens=False))
    try:
        if not is_list(piece) or isinstance(piece, set | frozenset):
            raise TypeError(f"{type(piece).__name__} is neither")
        return tuple(map(index, piece))
    except TypeError as error:
        raise PromptError(
            f"a piece is {repr(piece)[:60]}, expected text or token ids: {error}. Leave it out."
        ) from error


def list_chunks(chunks: Any) -> list[Piece]:
    """List chunks as texts and token ids: a document is its text."""
    expected = f"{EXPECTED}, or token ids"
    listed = []
    for number, chunk in enumerate(list_documents(chunks, "chunks")):
        listed.append(chunk if is_list(chunk) else text_of(chunk, f"chunk {number}", expected))
    return listed


def tokenize_chunks(tokenizer: Any, chunks: Sequence[Piece]) -> list[tuple[int, ...]]:
    """Token ids of chunks that `list_chunks` gave, none of which may be empty."""
    pieces = [tokenize(tokenizer, chunk) for chunk in chunks]
    if () in pieces:
        number = pieces.index(())
        raise PromptError(f"chunk {number} is {chunks[number]!r:.60} and has no token. Leave empty chunks out.")
    return pieces


def build(
    tokenizer: Any,
    prefix: Any,
    chunks: Any,
    question: Piece,
    separator: str = SEPARATOR,
) -> Prompt:
    """Turn the pieces of one request into ids."""
    is_text = prefix is None or isinstance(prefix, str)
    if is_text and not prefix:
        prefix = ()
    chunks = list_chunks(chunks)
    if not chunks and not len(prefix):
        raise PromptError(
            f"chunks is {chunks!r}, expected a list of at least one chunk. Without chunks there is nothing to "
            "reuse: call generate without a BlendCache."
        )
    pieces = tokenize_chunks(tokenizer, chunks)
    question_ids = tokenize(tokenizer, question)
    if not question_ids:
        raise PromptError(f"question is {question!r} and has no token. Ask something; the model answers after it.")
    begin = tokenize(tokenizer, prefix)
    if is_text:
        front = front_ids(tokenizer)
        if begin[: len(front)] != front:  # text of a chat template begins with it
            begin = (*front, *begin)
    before, *between = _separators(tokenizer, separator, [prefix, *chunks, question])
    if between:
        question_ids = (*between.pop(), *question_ids)
    return Prompt.of_pieces((*begin, *before), pieces, question_ids, between)


def _separators(tokenizer: Any, separator: str, pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """The ids between each piece and the next: none beside pieces of ids, nor where there is white space already."""
    if not isinstance(separator, str):
        raise PromptError(f"separator is {separator!r:.40}, expected a text. An empty one puts nothing between texts.")
    check_text(separator)
    separators = []
    for left, right in pairwise(pieces):
        ids: tuple[int, ...] = ()
        if isinstance(left, str) and isinstance(right, str):
            has_space = left[-1:].isspace() or right[:1].isspace()
            if not has_space:
                ids = inner_ids(tokenizer, separator)
        separators.append(ids)
    return separators


def batch(prompts: Sequence[Prompt], pad_id: int) -> tuple[Tensor, Tensor]:
    """Put requests side by side, padded on the left: their ids and their attention mask, `[batch, tokens]` each."""
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt.ids)
        ids[row, start:] = torch.tensor(prompt.ids)
        mask[row, start:] = 1
    return ids, mask


def build_all(
    tokenizer: Any,
    prefix: Any,
    chunks: Sequence[Any],
    question: Any,
    separator: str = SEPARATOR,
) -> list[Prompt]:
    """Turn the pieces of one request, or of a batch of them, into ids."""
    if isinstance(question, str) or not question or isinstance(question[0], int):
        return [build(tokenizer, prefix, chunks, question, separator)]
    shared = prefix is None or isinstance(prefix, str) or not len(prefix) or isinstance(prefix[0], int)
    prefixes = [prefix] * len(question) if shared else prefix
    if not len(prefixes) == len(chunks) == len(question):
        raise PromptError(
            f"a batch of {len(question)} questions came with {len(chunks)} lists of chunks and {len(prefixes)} "
            "prefixes. Give each question its own list of chunks."
        )
    return [build(tokenizer, *pieces, separator) for pieces in zip(prefixes, chunks, question, strict=True)]


def shared_tokens(row: Sequence[int] | np.ndarray, other: Sequence[int] | np.ndarray) -> int:
    """How many first token ids two prompts share."""
    size = min(len(row), len(other))
    differs = np.flatnonzero(np.asarray(row[:size]) != np.asarray(other[:size]))
    return int(differs[0]) if len(differs) else size


def check_ids(ids: Sequence[int], config: Any) -> None:
    """Refuse ids beyond the model's vocabulary: they are of another model's tokenizer."""
    size, largest = getattr(config, "vocab_size", None), max(ids, default=0)
    if size is not None and largest >= size:
        raise PromptError(
            f"the tokenizer gave id {largest}, but the model knows {size} ids, 0 to {size - 1}: it is another "
            "model's tokenizer. Load both from the same name or folder."
        )


def check_lengths(prompts: Sequence[Prompt], config: Any) -> None:
    """Refuse a prompt that does not fit the model."""
    longest = getattr(config, "max_position_embeddings", None)
    for prompt in prompts:
        check_ids(prompt.ids, config)
    tokens = max(len(prompt.ids) for prompt in prompts)
    if longest is not None and tokens > longest and not stretches(config):
        raise PromptLengthError(
            f"the prompt has {tokens} tokens, but the model has {longest} positions. Leave chunks out or shorten them."
        )
