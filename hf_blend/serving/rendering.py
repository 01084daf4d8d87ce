# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates with a time limit: the template is the model's own, but it loops over what the client sends.

A thread cannot be stopped from outside, and one that runs Python slows all others. So the thread looks at its CPU time
itself, at each call and each line of a template, and sleeps now and then in a render that takes long.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..errors import PromptError
from ..prompt.messages import render

__all__ = ["Renderer"]

TEMPLATE = "<template>"  # Jinja's name of the file that a template is compiled to
SHORT_S = 0.02  # a render that takes longer sleeps now and then
TURN_S, PAUSE_S = 0.001, 0.0005  # between two sleeps, and of each


class TooSlow(BaseException):
    """The time is over. It is no `Exception`, which a template or a library might catch."""


class Renderer:
    """Renders the chat template for one request, within CPU seconds of its thread for all renders together."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds, self._left = seconds, seconds

    def __call__(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> str:
        """Return the text that a chat template makes of messages."""
        if self._left is None:
            return render(tokenizer, messages, **arguments)
        started = time.thread_time()
        try:
            with _clock(started + self._left):
                return render(tokenizer, messages, **arguments)
        except TooSlow:
            raise PromptError(
                f"the chat template came to no end within {self._seconds:g} s for {len(messages)} messages with "
                f"{', '.join(arguments) or 'no arguments'}. Send fewer."
            ) from None
        finally:
            self._left -= time.thread_time() - started


@contextmanager
def _clock(until: float) -> Iterator[None]:
    """Raise `TooSlow` in Python code of this thread once its CPU time is beyond `until`."""
    turn = time.thread_time() + SHORT_S

    def look(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal turn
        now = time.thread_time()
        if now > until:
            raise TooSlow
        if now > turn:
            time.sleep(PAUSE_S)
            turn = now + TURN_S
        return look if frame.f_code.co_filename == TEMPLATE else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
