# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The default prefix of chunks: BOS, and a short text whose content does not matter.

Behind BOS alone the first tokens of a chunk become an attention sink, like the beginning of a prompt, and all others
have nothing else to attend to. Behind some prose, of any kind, both are nearly as they are in a prompt.

Source: ours; FusionRAG (arXiv 2601.12904) computes a chunk behind its nearest neighbours. Measured in
benchmarks/LOG.md; a text about passages, in the place of passages, or tokens at random do worse.
"""

from typing import Any

from torch import nn

from .anatomy import bos_prefix, text_config
from .capture import keeps_tokens_alone

TEXT = """\
The town lies on the east bank of the river, about forty miles from the coast. A railway was built in 1872, and \
the market moved to the square beside the new station. Most families worked at the mill until it closed in the \
spring of 1964.

Margaret Ellis (born 14 May 1931) was a Scottish botanist and writer. She studied in Edinburgh, taught for many \
years, and is best known for her books about the mosses of the northern lakes.

A lens bends light because light travels more slowly in glass than in air. The thicker a lens is in the middle, \
the nearer to it the rays meet, and the smaller the picture becomes.

"""
LEAST_POSITIONS = 1024  # of a model that has room for it beside chunks
MOST_TOKENS = 400  # more show that the tokenizer was made for another language


def default_prefix(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """BOS and the text, in a tokenizer's ids.

    BOS alone without a tokenizer or with one that lacks its words, for a model with few positions, and for one that
    keeps more of a chunk than K and V of each token (a mixer's state), which was not measured.
    """
    bos, config = bos_prefix(model), text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    if tokenizer is None or (positions is not None and positions < LEAST_POSITIONS) or not keeps_tokens_alone(model):
        return bos
    ids = tuple(tokenizer.encode(TEXT, add_special_tokens=False))
    is_readable = 0 < len(ids) <= MOST_TOKENS and getattr(tokenizer, "unk_token_id", None) not in ids
    return (*bos, *ids) if is_readable else bos
