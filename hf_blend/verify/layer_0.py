# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""At layer 0 a realigned chunk has the K and V of a full prefill, because they do not depend on the context."""

import torch

from ..model.capture import capture
from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from .base import Check, Outcome, rounding
from .floor import States, distance
from .subject import ModelUnderTest


class Layer0(Check):
    """A key is rounded three times where it is computed, there and here, and once more where it is moved."""

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Largest absolute difference of any K or V over the chunks of a prompt."""
        prompt = subject.prompts[0]
        wanted = self._wanted(subject)
        realigner = Realigner(subject.styles, BlendReport())
        realigner.set_table(0, subject.prompt_tables([prompt])[0])
        errors = [0.0]
        for number, (start, ids, *_) in enumerate(prompt.spans()):
            slot = PlacedChunk(0, start, subject.chunk(ids), False, number)
            fresh = tuple(states[:, slot.columns] for states in wanted)
            of_mixer = subject.mixers[0] is not None
            moved = slot.chunk.layers[0][-1:] if of_mixer else realigner.moved(0, slot, *fresh) if fresh else ()
            errors += [distance(*pair) for pair in zip(moved, fresh, strict=True)]
        largest = max((float(states.abs().amax()) for states in wanted), default=0.0)
        return Outcome(max(errors), subject.floor.layer_0 + largest * rounding(subject.dtype, 6, moves=1))

    @staticmethod
    def _wanted(subject: ModelUnderTest) -> States:
        """What layer 0 keeps in a full prefill; the projections of its mixer where it keeps no K and V."""
        prompt = subject.prompts[0]
        plain = subject.plain([prompt])[0].layers[0]
        if plain and subject.mixers[0] is None:
            return plain
        layer = capture(subject.model, torch.tensor([prompt.ids])).layers[0]
        return tuple(states[0] for states in layer[-1:])
