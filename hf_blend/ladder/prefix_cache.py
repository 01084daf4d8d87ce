# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One chunk at the beginning at ratio 0 is prefix caching, bit for bit."""

import torch
from transformers import DynamicCache

from ..prompt import Prompt
from .base import Outcome, Rung
from .floor import device_of, distance
from .subject import Subject


class PrefixCache(Rung):
    """With a sink and without, against a stock cache that holds the chunk and is continued with the question."""

    def measure(self, subject: Subject) -> Outcome:
        """Largest absolute difference of logits, and of any K or V at any layer; 0 is allowed."""
        return Outcome(max(_error(subject, sink) for sink in {(), subject.sink_ids}), 0.0)


@torch.no_grad()
def _error(subject: Subject, sink: tuple[int, ...]) -> float:
    prompt = Prompt(sink, subject.prompts[0].chunks[:1], subject.prompts[0].question)
    got, stock = subject.blend([prompt], 0.0, sink_ids=sink), _filled(subject, prompt)
    ids = torch.tensor([prompt.question], device=device_of(subject.model))
    wanted = subject.model(ids, past_key_values=stock, use_cache=True).logits.float()
    pairs = [(got.logits, wanted)]
    for mine, layer in zip(got.layers, stock.layers, strict=True):
        pairs += [(mine[0], layer.keys), (mine[1], layer.values)]
    return max(distance(*pair) for pair in pairs)


def _filled(subject: Subject, prompt: Prompt) -> DynamicCache:
    """A stock cache with sink and chunk.

    A product of one row may round unlike that of many, so the sink's columns come from a forward of the sink alone, as
    they do in a store, where many chunks share it.
    """
    full, device = DynamicCache(), device_of(subject.model)
    subject.model(
        torch.tensor([prompt.prefix + prompt.chunks[0]], device=device), past_key_values=full, use_cache=True
    )
    if prompt.prefix:
        sink, tokens = DynamicCache(), len(prompt.prefix)
        subject.model(torch.tensor([prompt.prefix], device=device), past_key_values=sink, use_cache=True)
        for whole, part in zip(full.layers, sink.layers, strict=True):
            whole.keys[:, :, :tokens], whole.values[:, :, :tokens] = part.keys, part.values
    return full
