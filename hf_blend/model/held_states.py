# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a model's own code feels the states that a cache holds: found out by running it, never by a list of types.

Some code takes a state into account only where one token comes at a time, and computes several as if nothing were
before them (Jamba and Zamba in transformers 5.23). So states are blanked: one that several tokens do not feel and a
single one does is ignored.
"""

import torch
from torch import Tensor, nn

from .anatomy import decoder_of, stock_cache, stock_layers, text_config
from .fingerprint import PerStructure
from .identity.canonical import canonical, notes_kept
from .modality import text_ids
from .placement import input_device

STATE_KINDS = ("conv_states", "recurrent_states")
HELD_TOKENS, SEVERAL = 9, 4


@PerStructure
def ignores_states(model: nn.Module) -> bool:
    """Return True if several tokens behind others are computed as if a cache held no state of these."""
    if not any(hasattr(layer, kind) for layer in stock_layers(text_config(model)) for kind in STATE_KINDS):
        return False
    with torch.inference_mode(False), canonical(model), notes_kept(model):
        return bool(_felt(model, 1) - _felt(model, SEVERAL))


def _felt(model: nn.Module, tokens: int) -> set[str]:
    """The kinds of states whose values reach anything that a forward of so many tokens leaves behind."""
    ids = text_ids(model, HELD_TOKENS + tokens)[None].to(input_device(model))

    def after(blank: str = "") -> list[Tensor]:
        cache, decoder = stock_cache(model), decoder_of(model)
        decoder(input_ids=ids[:, :HELD_TOKENS], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            for state in getattr(layer, blank, {}).values() if blank else ():
                if state is not None:
                    state.zero_()
        output = decoder(input_ids=ids[:, HELD_TOKENS:], past_key_values=cache, use_cache=True)
        held = (getattr(layer, kind, {}).values() for layer in cache.layers for kind in STATE_KINDS)
        return [output.last_hidden_state, *(state for states in held for state in states if state is not None)]

    plain = after()
    return {kind for kind in STATE_KINDS if not all(map(torch.equal, plain, after(kind)))}
