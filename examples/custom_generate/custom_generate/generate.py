# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A folder for `generate(custom_generate=...)`: documents and a question in, an answer out, KV of documents reused."""

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.model.anatomy import cache_argument


def generate(
    model,
    *,
    tokenizer=None,
    chunks=None,
    question=None,
    prefix=None,
    messages=None,
    documents=None,
    store="memory://",
    recompute_ratio=BlendConfig.recompute_ratio,
    selector=BlendConfig.selector,
    **arguments,
):
    """Answer a question over chunks, or go on with a prompt in which stored chunks are found.

    Args:
        model: given by transformers.
        tokenizer: of the model; needed for messages, and for chunks that are text.
        chunks: retrieved documents; None takes the prompt as it is.
        question: behind them.
        prefix: system prompt before them.
        messages: for a chat model, in place of chunks and question; its own template is used.
        documents: texts that are in the messages.
        store: a `ChunkStore`, or where to open one.
        recompute_ratio: share of the reusable tokens that is recomputed.
        selector: which tokens these are.
        **arguments: everything else that `generate` takes.

    Returns:
        What `generate` returns.
    """
    opened = store if isinstance(store, ChunkStore) else ChunkStore.open(store)
    cache = BlendCache(model, opened, recompute_ratio=recompute_ratio, selector=selector)
    if messages:
        arguments |= cache.inputs_from_messages(tokenizer, messages, documents)
    elif chunks:
        arguments |= cache.inputs(tokenizer, prefix=prefix, chunks=chunks, question=question)
    return model.generate(**arguments, **cache_argument(model, cache))
