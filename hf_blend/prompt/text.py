# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that are one text: it is tokenised once, and chunks are found by their characters.

A tokenizer may make other tokens of a chunk at its ends, where it is joined to other text. So a chunk is stored under
its own ids, and the prompt reuses a run inside of it; the tokens at the seams are computed.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from ..errors import PromptError
from .documents import forms_of, list_documents
from .pieces import Prompt, Span, check_text, tokenize

_SEAM_TOKENS = 8  # so many tokens at either end of a chunk may differ in a prompt
_WIDTH = 4  # bytes of a packed token
_REMEMBERED = 4096  # documents of each tokenizer

_remembered: WeakKeyDictionary[Any, Callable[[str, int], tuple[int, ...]]] = WeakKeyDictionary()


def build_text(tokenizer: Any, text: str, chunks: Any, *, special: bool, opening: bool = True) -> Prompt:
    """Tokenise a prompt and find chunks in it.

    Args:
        tokenizer: of the model.
        text: the whole prompt.
        chunks: documents, all of which are expected in the text.
        special: whether the tokenizer puts its special tokens around the text.
        opening: whether other prompts may begin with the text before the first document.
    """
    forms = []
    for number, chunk in enumerate(list_documents(chunks)):
        forms.append(forms_of(chunk, f"document {number}"))
    located = _locate(text, forms)
    ids, offsets = _tokenized(tokenizer, text, special, bool(located))
    packed = array("i", ids).tobytes()
    size = len(tokenizer) if hasattr(type(tokenizer), "__len__") else 0
    ids_of = _remembering(tokenizer)
    spans = list[Span]()
    first = len(ids)
    for start, stop, chunk in located:
        begin, end = (0, len(ids)) if offsets is None else _columns(offsets, start, stop)
        least = spans[-1].stop if spans else 0
        begin = max(begin, least)
        span = aligned(packed, begin, end, least, ids_of(chunk, size))
        if span is None and offsets is not None:
            span = Span.whole(begin, ids[begin:end])  # its tokens are others throughout: these are a chunk too
        if span is not None and span.tokens:
            first = min(first, begin, span.start)
            spans.append(span)
    has_opening = opening and spans and offsets is not None
    return Prompt(tuple(ids), tuple(spans), first if has_opening else 0, is_searched=True)


def _tokenized(tokenizer: Any, text: str, special: bool, located: bool) -> tuple[list[int], np.ndarray | None]:
    """Token ids, and first and last character of each, `[tokens, 2]`, ascending; None if these are not known."""
    check_text(text)
    is_fast = located and bool(getattr(tokenizer, "is_fast", False))
    made = tokenizer(text, add_special_tokens=special, **({"return_offsets_mapping": True} if is_fast else {}))
    ids, bos = list(made["input_ids"]), getattr(tokenizer, "bos_token_id", None)
    if not ids:
        raise PromptError(f"the text {text!r:.40} has no token. Ask something; the model answers after it.")
    if special and bos is not None and ids[:2] == [bos, bos]:
        raise PromptError(
            f"the text begins with {text[:12]!r}, which is BOS (id {bos}), and the tokenizer puts another before it; "
            "one is expected. Pass add_special_tokens=False for text of a chat template, or use inputs_from_messages."
        )
    return ids, np.maximum.accumulate(np.array(made["offset_mapping"])) if is_fast else None


def _columns(offsets: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """First token, and token behind the last, with characters of a piece of text; special tokens have none."""
    return int(np.searchsorted(offsets[:, 1], start, "right")), int(np.searchsorted(offsets[:, 0], stop, "left"))


def _remembering(tokenizer: Any) -> Callable[[str, int], tuple[int, ...]]:
    """Caches the ids of documents, because tokenising them takes as long as the prompt.

    The second argument is the size of the vocabulary, to which tokens may be added.
    """
    if tokenizer not in _remembered:
        own = ref(tokenizer)  # not the tokenizer, which would be kept alive
        _remembered[tokenizer] = lru_cache(_REMEMBERED)(lambda text, _: tokenize(own(), text))
    return _remembered[tokenizer]


def _locate(text: str, chunks: Sequence[Sequence[str]]) -> list[tuple[int, int, str]]:
    """(first character, character behind the last, chunk) wherever a chunk is, longer ones first, without overlap.

    Of the forms of a chunk the first counts that is there.
    """
    located = list[tuple[int, int, str]]()
    taken = bytearray(len(text))
    longest_first = sorted(enumerate(chunks), key=lambda pair: -len(pair[1][0]))
    for number, forms in longest_first:
        chunk, spelling = _form_in(text, forms)
        if not spelling:
            raise PromptError(
                f"document {number} ({forms[-1]!r:.40}) is not in the prompt. Put its text into a message as it is; "
                "for a template that takes documents pass them as dicts: [{'title': …, 'text': …}]."
            )
        start = text.find(spelling)
        while start >= 0:
            stop = start + len(spelling)
            if not any(taken[start:stop]):
                located.append((start, stop, chunk))
                taken[start:stop] = b"\1" * len(spelling)
            start = text.find(spelling, stop)
    return sorted(located)


def _form_in(text: str, forms: Sequence[str]) -> tuple[str, str]:
    """The first form of a document that is in a text, and how it is spelled there; empty if there is none."""
    for form in forms:
        check_text(form)
        for spelling in _spellings(form):
            if spelling in text:
                return form, spelling
    return "", ""


def _spellings(chunk: str) -> tuple[str, ...]:
    """How templates write a text: as it is, stripped, or as JSON."""
    return chunk, chunk.strip(), json.dumps(chunk, ensure_ascii=False)[1:-1], json.dumps(chunk)[1:-1]


def aligned(packed: bytes, begin: int, end: int, least: int, chunk: tuple[int, ...]) -> Span | None:
    """The run of tokens that a chunk and a prompt share; None if the tokens inside the chunk differ.

    Args:
        packed: ids of the prompt, four bytes each.
        begin: first token of the prompt where the chunk's inner tokens may be.
        end: the token behind the last of them.
        least: the first token of the prompt that no earlier chunk has.
        chunk: ids of the chunk.
    """
    # Find the inner tokens, on a whole token
    count = len(chunk)
    cut = min(_SEAM_TOKENS, count // 4)
    inside = array("i", chunk[cut : count - cut]).tobytes()
    at = packed.find(inside, _WIDTH * begin, _WIDTH * end)
    while at >= 0 and at % _WIDTH:
        at = packed.find(inside, at + 1, _WIDTH * end)
    if at < 0:
        return None

    # Extend the run to both sides, as far as the tokens are the same
    prompt = memoryview(packed).cast("i")
    shift = at // _WIDTH - cut
    first = cut
    while first > 0 and shift + first > least and prompt[shift + first - 1] == chunk[first - 1]:
        first -= 1
    last = count - cut
    while last < count and shift + last < len(prompt) and prompt[shift + last] == chunk[last]:
        last += 1
    return Span(shift + first, chunk, first, last - first)
