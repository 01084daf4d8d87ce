# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that are one text: it is tokenised once, and chunks are found by their characters.

A tokenizer may make other tokens of a chunk at its ends, where it is joined to other text. So a chunk is stored under
its own ids, and the prompt reuses a run inside of it; the tokens at the seams are computed.
"""

import json
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from ..errors import PromptError
from .documents import forms_of, list_documents
from .pieces import Span, TextPrompt, check_text, tokenize

_SEAM_TOKENS = 8  # so many tokens at either end of a chunk may differ in a prompt
_WIDTH = 4  # bytes of a packed token
_REMEMBERED = 4096  # documents of each tokenizer

_remembered: WeakKeyDictionary[Any, Callable[[str, int], tuple[int, ...]]] = WeakKeyDictionary()


def build_text(tokenizer: Any, text: str, chunks: Any, *, special: bool, opening: bool = True) -> TextPrompt:
    """Tokenise a prompt and find chunks in it."""
    located = _located(text, [forms_of(chunk, f"document {at}") for at, chunk in enumerate(list_documents(chunks))])
    ids, offsets = _tokenized(tokenizer, text, special, bool(located))
    packed, spans = array("i", ids).tobytes(), list[Span]()
    first, ids_of = len(ids), _remembering(tokenizer)
    size = len(tokenizer) if hasattr(type(tokenizer), "__len__") else 0
    for start, stop, chunk in located:
        begin, end = _columns(offsets, start, stop) if offsets is not None else (0, len(ids))
        least = spans[-1].stop if spans else 0
        begin = max(begin, least)
        span = aligned(packed, begin, end, least, ids_of(chunk, size))
        if span is None and offsets is not None:
            span = Span.whole(begin, ids[begin:end])  # its tokens are others throughout: these are a chunk too
        if span is not None and span.tokens:
            first = min(first, begin, span.start)
            spans.append(span)
    return TextPrompt(tuple(ids), tuple(spans), first if opening and spans and offsets is not None else 0)


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


def _located(text: str, chunks: Sequence[Sequence[str]]) -> list[tuple[int, int, str]]:
    """(first character, character behind the last, chunk) wherever a chunk is, longer ones first, without overlap.

    Of the forms of a chunk the first counts that is there.
    """
    located, taken = list[tuple[int, int, str]](), bytearray(len(text))
    decomposed = cache(lambda: _decomposed(text))
    for number, forms in sorted(enumerate(chunks), key=lambda pair: -len(pair[1][0])):
        places = next(filter(None, (_places(text, chunk, decomposed) for chunk in forms)), [])
        if not places:
            raise PromptError(
                f"document {number} ({forms[-1]!r:.40}) is not in the prompt. Put its text into a message as it is; "
                "for a template that takes documents pass them as dicts: [{'title': …, 'text': …}]."
            )
        for start, stop, same in places:
            if taken.find(1, start, stop) < 0:
                located.append((start, stop, same))
                taken[start:stop] = b"\1" * (stop - start)
    return sorted(located)


def _places(text: str, chunk: str, decomposed: Callable[[], tuple[str, dict[int, int]]]) -> list[tuple[int, int, str]]:
    check_text(chunk)
    form = next((spelling for spelling in _forms(chunk) if spelling in text), None)
    if form is not None:
        return [(at, at + len(form), chunk) for at in _occurrences(text, form)]
    return [] if text.isascii() else _equivalent(text, chunk, *decomposed())


def _occurrences(text: str, fragment: str) -> Iterator[int]:
    at = text.find(fragment)
    while at >= 0:
        yield at
        at = text.find(fragment, at + len(fragment))


def _decomposed(text: str) -> tuple[str, dict[int, int]]:
    """A text in NFD, and a map from the first characters there to those in the text."""
    starts = [at for at, char in enumerate(text) if not (at and unicodedata.combining(char))] + [len(text)]
    parts = [unicodedata.normalize("NFD", text[start:stop]) for start, stop in pairwise(starts)]
    return "".join(parts), dict(zip(accumulate(map(len, parts), initial=0), starts, strict=True))


def _equivalent(text: str, chunk: str, body: str, starts: dict[int, int]) -> list[tuple[int, int, str]]:
    """Find a chunk whose accents are encoded otherwise; the chunk is then the text of the prompt there."""
    for form in _forms(unicodedata.normalize("NFD", chunk)):
        ends = [(at, at + len(form)) for at in _occurrences(body, form) if {at, at + len(form)} <= starts.keys()]
        if ends:
            return [(starts[at], starts[to], text[starts[at] : starts[to]]) for at, to in ends]
    return []


def _forms(chunk: str) -> tuple[str, ...]:
    """The forms in which templates write a text: as it is, stripped, or as JSON."""
    return chunk, chunk.strip(), json.dumps(chunk, ensure_ascii=False)[1:-1], json.dumps(chunk)[1:-1]


def aligned(packed: bytes, begin: int, end: int, least: int, chunk: tuple[int, ...]) -> Span | None:
    """The run of tokens that a chunk and a prompt share; None if the tokens inside the chunk differ."""
    count = len(chunk)
    cut = min(_SEAM_TOKENS, count // 4)
    inside = array("i", chunk[cut : count - cut]).tobytes()
    at = packed.find(inside, _WIDTH * begin, _WIDTH * end)
    while at >= 0 and at % _WIDTH:
        at = packed.find(inside, at + 1, _WIDTH * end)
    if at < 0:
        return None
    shift = at // _WIDTH - cut
    low, high = max(0, least - shift), min(count, len(packed) // _WIDTH - shift)
    here = np.frombuffer(packed, np.int32)[shift + low : shift + high]
    differs = here != np.array(chunk[low:high], np.int32)
    before, behind = np.flatnonzero(differs[: cut - low][::-1]), np.flatnonzero(differs[count - cut - low :])
    first = low if not len(before) else cut - int(before[0])
    last = high if not len(behind) else count - cut + int(behind[0])
    return Span(shift + first, chunk, first, last - first)
