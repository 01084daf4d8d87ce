# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The text of an answer while its tokens are generated."""

import functools
import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")  # of SentencePiece, for what its vocabulary lacks
CUT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
MOST_HELD = 16  # tokens; no character has so many


class Detokenizer:
    """Decodes an answer piece by piece; text that may still change, or may begin a stop text, is held back.

    Each step decodes the tokens since the last whole character, behind those of the piece before it, because a
    tokenizer may decode a token otherwise at the beginning of a text. `DecodeStream` of tokenizers does so too, but
    never returns an end that is cut off, and slow tokenizers have none.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, skips_special: bool = True) -> None:
        self._tokenizer, self._stops, self._skips_special = tokenizer, stops, skips_special
        self._start = self._read = 0  # tokens: the first of the piece before, the first that is no text yet
        self._held = ""  # text that may begin a stop
        self._windows = list[int]()  # of each token, the first that was decoded with it
        self.text = ""  # given out so far
        self.offsets = list[int]()  # of each token, the characters before the one that it is, or is part of
        self.is_stopped = False

    def feed(self, tokens: Sequence[int], is_last: bool) -> str:
        """Take all tokens so far, and return the new text."""
        unsent = self._held
        for end in range(len(self.offsets) + 1, len(tokens) + 1):
            self._windows.append(self._start)
            self.offsets.append(len(self.text) + len(unsent))
            unsent += self._decoded(tokens, end)
        if is_last:
            unsent += self._decoded(tokens, len(tokens), is_last)
        stops = [at for at in map(unsent.find, self._stops) if at >= 0]
        begun = [] if is_last else [_begins(unsent, stop) for stop in self._stops]
        self.is_stopped = bool(stops)
        end = min(stops or begun, default=len(unsent))
        new, self._held = unsent[:end], unsent[end:]
        self.text += new
        return new

    @property
    def tokens_given(self) -> int:
        """How many tokens the returned text consists of; the last one may reach beyond it."""
        return bisect_left(self.offsets, len(self.text))

    def added(self, tokens: Sequence[int], index: int, candidates: Sequence[int]) -> list[bytes]:
        """The bytes of text that each candidate token would add behind the first `index` tokens.

        The bytes of all tokens of an answer, joined, are its text. A token that is part of a character has its own
        bytes; a special token that is skipped has none.
        """
        front = tokens[self._windows[index] : index]
        before, texts = self._decode(front), list[bytes]()
        for token in candidates:
            now = self._decode([*front, token])
            new = now.removeprefix(before)
            is_cut = before.endswith(CUT) or CUT in new or not now.startswith(before)
            texts.append(self._own_bytes(token) if is_cut else new.encode())
        return texts

    def _decoded(self, tokens: Sequence[int], end: int, is_last: bool = False) -> str:
        """The text that token `end - 1` completes; empty if no character is complete."""
        before, now = self._decode(tokens[self._start : self._read]), self._decode(tokens[self._start : end])
        if now.endswith(CUT) and not is_last and end - self._read < MOST_HELD:
            return ""
        new = now[len(before) :] if now.startswith(before) else self._decode(tokens[self._read : end])
        if new or end - self._start > 2 * MOST_HELD:  # special tokens have no text
            self._start, self._read = self._read, end
        return new

    def _own_bytes(self, token: int) -> bytes:
        """The bytes of a token; from its name in the vocabulary, if that encodes bytes."""
        name, alone = self._tokenizer.convert_ids_to_tokens(token), self._decode([token])
        if isinstance(name, bytes):
            return name
        name = name or ""  # of an id beyond the vocabulary
        if matched := BYTE_TOKEN.fullmatch(name):
            return bytes.fromhex(matched[1])
        if CUT in alone and all(char in _bytes_of_chars() for char in name):
            return bytes(_bytes_of_chars()[char] for char in name)
        return self._decode([token, token])[len(alone) :].encode()  # behind others: a text may begin without its space

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips_special))


@functools.cache
def _bytes_of_chars() -> dict[str, int]:
    """The byte of each character in names of byte-level vocabularies, such as GPT-2's."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {char: byte for byte, char in bytes_to_unicode().items()}


def _begins(text: str, stop: str) -> int:
    """Where the text ends in a beginning of a stop text; its length if it does not."""
    first = max(0, len(text) - len(stop) + 1)
    return next((at for at in range(first, len(text)) if stop.startswith(text[at:])), len(text))
