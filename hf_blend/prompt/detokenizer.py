# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Text of an answer while its tokens come."""

from collections.abc import Sequence
from typing import Any

MOST_HELD = 16  # tokens; no character has so many


class Detokenizer:
    """Text of an answer as it grows: what may still change, or begin a stop text, is held back.

    Each step decodes the tokens since the last whole character, behind those of the piece before it, for a tokenizer
    may write a token otherwise where a text begins. tokenizers' own `DecodeStream` does so too, but keeps an end that
    is cut off to itself, and there is none for a tokenizer in Python.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, skips_special: bool = True) -> None:
        self._tokenizer, self._stops, self._skips_special = tokenizer, stops, skips_special
        self._start = self._read = 0  # tokens: the first of the piece before, the first that is no text yet
        self._held = ""  # text that may begin a stop
        self.text = ""  # given out so far
        self.is_stopped = False

    def feed(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text that is new."""
        held = self._held + self._decoded(tokens, is_last)
        found = [at for at in map(held.find, self._stops) if at >= 0]
        begun = [] if is_last else [_begins(held, stop) for stop in self._stops]
        self.is_stopped = bool(found)
        end = min(found or begun, default=len(held))
        new, self._held = held[:end], held[end:]
        self.text += new
        return new

    def _decoded(self, tokens: Sequence[int], is_last: bool) -> str:
        """The text of the tokens that are new, if they end with a whole character."""
        before, now = self._decode(tokens[self._start : self._read]), self._decode(tokens[self._start :])
        if now.endswith("\ufffd") and not is_last and len(tokens) - self._read < MOST_HELD:
            return ""
        new = now[len(before) :] if now.startswith(before) else self._decode(tokens[self._read :])
        if new or len(tokens) - self._start > 2 * MOST_HELD:  # special tokens have no text
            self._start, self._read = self._read, len(tokens)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=self._skips_special))


def _begins(text: str, stop: str) -> int:
    """Where the end of a text begins that is the beginning of a stop; its length if none is."""
    first = max(0, len(text) - len(stop) + 1)
    return next((at for at in range(first, len(text)) if stop.startswith(text[at:])), len(text))
