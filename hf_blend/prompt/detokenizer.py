# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Text of an answer while its tokens come."""

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer"]

class Detokenizer:
    """Text of an answer as it grows: what may still change, or begin a stop text, is held back.

    Args:
        tokenizer: of the model.
        stops: texts that end the answer, and are no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self.text = ""  # given out so far
        self.is_stopped = False

    def feed(self, tokens: list[int], is_last: bool) -> str:
        """The text that is new.

        Args:
            tokens: of the whole answer so far.
            is_last: nothing comes behind them.
        """
        whole = self._tokenizer.decode(tokens, skip_special_tokens=True)
        places = (whole.find(stop, max(0, len(self.text) - len(stop))) for stop in self._stops)
        found = [at for at in places if at >= 0]
        if found:
            self.is_stopped, whole = True, whole[: min(found)]
        elif not is_last:
            whole = whole[: len(whole) - self._uncertain(whole)]
        new = whole[len(self.text) :] if whole.startswith(self.text) else ""
        self.text += new
        return str(new)

    def _uncertain(self, whole: str) -> int:
        """How many characters at the end may change with the next token."""
        broken = len(whole) - len(whole.rstrip("\ufffd"))
        begun = [n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
        return max([broken, *begun])
