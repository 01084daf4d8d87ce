# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""At layer 0 a realigned chunk has the K and V of a full prefill, because they do not depend on the context."""

from ..prefill.plan import Slot
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from .base import Outcome, Rung, rounding
from .floor import distance
from .subject import Subject


class Layer0(Rung):
    """A key is rounded three times where it is computed, there and here, and once more where it is moved."""

    def measure(self, subject: Subject) -> Outcome:
        """Largest absolute difference of any K or V over the chunks of a prompt."""
        prompt = subject.prompts[0]
        wanted = subject.plain([prompt])[0].layers[0]
        realigner = Realigner(subject.styles, BlendReport())
        realigner.learn(0, subject.prompt_tables([prompt])[0])
        errors = []
        for number, (start, ids, *_) in enumerate(prompt.spans()):
            slot = Slot(0, start, subject.chunk(ids), False, number)
            fresh = tuple(states[:, slot.columns] for states in wanted)
            errors += [distance(*pair) for pair in zip(realigner.moved(0, slot, *fresh), fresh, strict=True)]
        largest = max(float(states.abs().amax()) for states in wanted)
        return Outcome(max(errors), subject.floor.layer_0 + largest * rounding(subject.dtype, 6, moves=1))
