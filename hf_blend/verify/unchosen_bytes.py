# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A slot that was not chosen holds the bytes of the realigned store at every layer behind the check layer."""

import torch

from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from .base import Check, Outcome, violations
from .slots import chunk_slots, unchosen
from .subject import ModelUnderTest

RATIO = 0.3


class UnchosenBytes(Check):
    """In a batch, against chunks that are computed and realigned again, by the same `Realigner`.

    So this shows that a request leaves these bytes alone, not that they are right: that is shown by `moved_chunk` and
    `layer_0`, from forwards of the model.
    """

    def measure(self, subject: ModelUnderTest) -> Outcome:
        """Number of layers in which a byte differs; 0 is allowed."""
        got = subject.blend(subject.prompts, RATIO)
        kept, slots = unchosen(got), chunk_slots(subject, got)
        if not kept.any():
            return violations(["every slot was chosen, so nothing was shown"])
        realigner, wrong = Realigner(subject.styles, BlendReport()), []
        tables = subject.prompt_tables(subject.prompts)
        for index in range(got.cache.config.check_layers[0] + 1, subject.num_layers):
            if not got.layers[index]:
                continue
            realigner.set_table(index, tables[index])
            laid = tuple(torch.zeros_like(states) for states in got.layers[index])
            realigner.write(index, slots, *laid)
            for name, mine, wanted in zip("KV", got.layers[index], laid, strict=True):
                if not torch.equal(mine.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept]):
                    wrong.append(f"{name} of layer {index}")
        return violations(wrong)
