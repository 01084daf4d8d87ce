# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The text of an answer while its tokens are generated."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

CUT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
MOST_HELD = 16  # tokens; no character has so many


class Detokenizer:
    """Decodes an answer piece by piece; text that may still change, or may begin a stop text, is held back.

    Each step decodes the tokens since the last whole character, behind those of the piece before it, because a
    tokenizer may decode a token otherwise at the beginning of a text. `DecodeStream` of tokenizers does so too, but
    never returns an end that is cut off, and slow tokenizers have none.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._start = self._read = 0  # tokens: the first of the piece before, the first that is no text yet
        self._held = ""  # text that may begin a stop
        self.text = ""  # given out so far
        self._fed = 0  # tokens
        self.is_stopped = False

    def feed(self, tokens: Sequence[int], is_last: bool) -> str:
        """Take all tokens so far, and return the new text."""
        unsent = self._held
        for end in range(self._fed + 1, len(tokens) + 1):
            unsent += self._decoded(tokens, end)
        self._fed = len(tokens)
        if is_last:
            unsent += self._decoded(tokens, len(tokens), is_last)
        stops = [at for at in map(unsent.find, self._stops) if at >= 0]
        begun = [] if is_last else [_begins(unsent, stop) for stop in self._stops]
        self.is_stopped = bool(stops)
        end = min(stops or begun, default=len(unsent))
        new, self._held = unsent[:end], unsent[end:]
        self.text += new
        return new

    def _decoded(self, tokens: Sequence[int], end: int, is_last: bool = False) -> str:
        """The text that token `end - 1` completes; empty if no character is complete."""
        before, now = self._decode(tokens[self._start : self._read]), self._decode(tokens[self._start : end])
        if now.endswith(CUT) and not is_last and end - self._read < MOST_HELD:
            return ""
        new = now[len(before) :] if now.startswith(before) else self._decode(tokens[self._read : end])
        if new or end - self._start > 2 * MOST_HELD:  # special tokens have no text
            self._start, self._read = self._read, end
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class TokenStreamer(BaseStreamer):
    """Passes on the tokens of an answer. A stopping criterion would also see candidates of assisted decoding."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        self._tell = tell
        self._is_prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Drop the prompt, which comes first, and pass on the tokens of each step."""
        if self._is_prompt_seen:
            self._tell(value.flatten().tolist())
        self._is_prompt_seen = True

    def end(self) -> None:
        """Do nothing: no token is held back."""


def _begins(text: str, stop: str) -> int:
    """Where the text ends in a beginning of a stop text; its length if it does not."""
    first = max(0, len(text) - len(stop) + 1)
    return next((at for at in range(first, len(text)) if stop.startswith(text[at:])), len(text))
