# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A changed token moves no recomputed state before it, although the recomputed tokens are scattered.

The tokens are chosen at random, so that the choice does not look at what is changed.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..prompt import Prompt
from ..selectors.base import KV
from .base import Outcome, Rung
from .floor import distance
from .subject import Subject

RATIO = 0.5


class Causality(Rung):
    """A token is changed in the middle of a chunk, at its end, and in the question."""

    def measure(self, subject: Subject) -> Outcome:
        """Largest change of any K or V before the token.

        Allowed is 0, if the plain model moves nothing there either. A mixture of experts may: a token that goes to
        another expert changes the shapes in which others are computed; then the floor is allowed.
        """
        prompt = subject.prompts[0]
        before, plain_before = _states(subject, prompt), subject.plain([prompt])[0].layers
        error, plain_error, moved = 0.0, 0.0, 0.0
        for changed, place in _changes(subject, prompt):
            after = _states(subject, changed)
            error = max(error, _apart(before, after, slice(0, place)))
            moved = max(moved, _apart(before, after, slice(place, None)))
            plain_after = subject.plain([changed])[0].layers
            plain_error = max(plain_error, _apart(plain_before, plain_after, slice(0, place)))
        if not moved:
            return Outcome(float("inf"), 0.0, "the changed tokens changed nothing, so nothing was shown")
        return Outcome(error, subject.floor.states if plain_error else 0.0)


def _states(subject: Subject, prompt: Prompt) -> list[KV]:
    layers = subject.blend([prompt], RATIO, selector="random").layers
    return [(keys[0], values[0]) for keys, values in layers]


def _changes(subject: Subject, prompt: Prompt) -> list[tuple[Prompt, int]]:
    """The prompt with one other token, and its column."""
    changes = []
    (start, _), middle = prompt.spans()[1], len(prompt.chunks[1]) // 2
    for offset in (middle, len(prompt.chunks[1]) - 1):
        chunks = (prompt.chunks[0], _other(subject, prompt.chunks[1], offset), *prompt.chunks[2:])
        changes.append((replace(prompt, chunks=chunks), start + offset))
    offset = len(prompt.question) // 2
    question = _other(subject, prompt.question, offset)
    return [*changes, (replace(prompt, question=question), len(prompt.ids) - len(question) + offset)]


def _other(subject: Subject, ids: Sequence[int], place: int) -> tuple[int, ...]:
    return (*ids[:place], (ids[place] + 1) % subject.vocabulary, *ids[place + 1 :])


def _apart(before: Sequence[KV], after: Sequence[KV], columns: slice) -> float:
    pairs = [
        (a[:, columns], b[:, columns]) for one in zip(before, after, strict=True) for a, b in zip(*one, strict=True)
    ]
    return max(distance(a, b) for a, b in pairs)
