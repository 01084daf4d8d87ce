# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`generate` of a folder or model: stored KV is reused, by `custom_generate=` or in `transformers serve`."""

import functools
import logging

from hf_blend import BlendCache, ChunkStore

logger = logging.getLogger("hf_blend")
open_store = functools.cache(ChunkStore.open)


def generate(
    model,
    *,
    tokenizer=None,
    text=None,
    messages=None,
    documents=None,
    store=None,
    recompute_ratio=None,
    selector=None,
    **arguments,
):
    """Generate as the model does, with stored chunks of the prompt reused.

    Args:
        model: given by transformers.
        tokenizer: of the model; needed for messages and text.
        text: a prompt, in place of `input_ids`.
        messages: of a chat, in place of `input_ids`; the tokenizer's template is used.
        documents: texts that are in the messages or the text; those that the store lacks are computed.
        store: a `ChunkStore`, or where to open one; None is the folder of the `hf-blend` commands.
        recompute_ratio: share of the reusable tokens that is recomputed; None as tuned, else the default.
        selector: which tokens these are; None likewise.
        **arguments: everything else that `generate` takes.

    Returns:
        What `generate` returns.
    """
    opened = store if isinstance(store, ChunkStore) else open_store(store)
    settings = {"recompute_ratio": recompute_ratio, "selector": selector}
    cache = BlendCache(model, opened, **{name: value for name, value in settings.items() if value is not None})
    if messages is not None:
        arguments |= cache.inputs_from_messages(tokenizer, messages, documents)
    elif text is not None:
        arguments |= cache.inputs_from_text(tokenizer, text, documents)
    # The class's own method: a model that is loaded from this folder has this function in its place
    output = type(model).generate(model, **arguments, **cache.keyword, tokenizer=tokenizer)
    logger.info("%s", cache.report)
    return output
