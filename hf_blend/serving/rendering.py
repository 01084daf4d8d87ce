# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates under a clock: a template is the model's own, but what it loops over is the client's.

A thread cannot be stopped from outside, and one that runs Python slows all others. So the thread looks at its clock
itself, at each call and each line of a template, and lets others go first in a render that takes long.
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
SHORT_S = 0.02  # a render that takes longer lets others go first
TURN_S, PAUSE_S = 0.001, 0.0005  # so long it runs at once, and waits


class TooSlow(BaseException):
    """The time is over; no handler of a template's or of a library's takes it for an error."""


class Renderer:
    """Renders what one request asks for, within CPU seconds of its thread in all."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds, self._left = seconds, seconds

    def __call__(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> str:
        """The text that a chat template makes of messages."""
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
    """Raise `TooSlow` in Python code of this thread when it is time."""
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
