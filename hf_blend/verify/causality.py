# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A changed token moves no recomputed state before it, although the recomputed tokens are scattered.

The tokens are chosen at random, so that the choice does not look at what is changed.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..prompt.pieces import Prompt
from .base import Check, Outcome
from .floor import States, distance, in_pieces
from .subject import ModelUnderTest

RATIO = 0.5
PIECE_TOKENS = (2, 3, 4, 8, 16, 32, 64, 128)  # in each, experts multiply other numbers of rows


class Causality(Check):
    """A token is changed in the middle of a chunk, at its end, and in the question."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest change of any K or V before the token; 0 is allowed.

        A mixture of experts is another matter: a token that goes to another expert changes the shapes in which others
        are computed. Where the plain model moves states before the token as well, the floor is allowed.
        """
        prompt = subject.prompts[0]
        before, error, moved = _states(subject, prompt), 0.0, 0.0
        changes = _changes(subject, prompt)
        for changed, place in changes:
            after = _states(subject, changed)
            error = max(error, _apart(before, after, slice(0, place)))
            moved = max(moved, _apart(before, after, slice(place, None)))
        if not moved:
            return Outcome(float("inf"), 0.0, "the changed tokens changed nothing, so nothing was shown")
        return Outcome(error, subject.floor.states if error and _moves_plainly(subject, prompt, changes) else 0.0)


def _moves_plainly(subject: ModelUnderTest, prompt: Prompt, changes: Sequence[tuple[Prompt, int]]) -> bool:
    """Whether the plain model, whole or in pieces of some length, moves states before a changed token."""
    for pieces in sorted({max(1, len(prompt.ids) // tokens) for tokens in PIECE_TOKENS}):
        before = in_pieces(subject.model, [prompt], pieces)[0].layers
        for changed, place in changes:
            after = in_pieces(subject.model, [changed], pieces)[0].layers
            if _apart(before, after, slice(0, place)):
                return True
    return False


def _states(subject: ModelUnderTest, prompt: Prompt) -> list[States]:
    layers = subject.blend([prompt], RATIO, selector="random").layers
    return [tuple(states[0] for states in layer) for layer in layers]


def _changes(subject: ModelUnderTest, prompt: Prompt) -> list[tuple[Prompt, int]]:
    """The prompt with one other token, and its column."""
    changes = []
    (start, *_), middle = prompt.spans()[1], len(prompt.chunks[1]) // 2
    for offset in (middle, len(prompt.chunks[1]) - 1):
        chunks = (prompt.chunks[0], _other(subject, prompt.chunks[1], offset), *prompt.chunks[2:])
        changes.append((replace(prompt, chunks=chunks), start + offset))
    offset = len(prompt.question) // 2
    question = _other(subject, prompt.question, offset)
    return [*changes, (replace(prompt, question=question), len(prompt.ids) - len(question) + offset)]


def _other(subject: ModelUnderTest, ids: Sequence[int], place: int) -> tuple[int, ...]:
    return (*ids[:place], (ids[place] + 1) % subject.vocabulary, *ids[place + 1 :])


def _apart(before: Sequence[States], after: Sequence[States], columns: slice) -> float:
    pairs = [
        (a[:, columns], b[:, columns]) for one in zip(before, after, strict=True) for a, b in zip(*one, strict=True)
    ]
    return max((distance(a, b) for a, b in pairs), default=0.0)
