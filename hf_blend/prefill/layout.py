# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model's KV looks like: heads, widths, dtypes and rotary tables of each layer.

Stored chunks are compared with it before they are used. It is read off a forward of a few tokens, not off the config:
a layer decides itself what it keeps (latent attention, sixteen bits, keys of another width than values).
"""

from torch import nn

from ..model.capture import capture_chunk
from ..model.fingerprint import per_model
from ..model.modality import text_ids
from ..store.chunk import Layout

__all__ = ["layout_of"]

PROBE_TOKENS = 4


@per_model
def layout_of(model: nn.Module) -> Layout:
    """The layout of a model's KV, found by one short forward and remembered until the fingerprint changes."""
    return capture_chunk(model, text_ids(model, PROBE_TOKENS).tolist(), (), "").layout
