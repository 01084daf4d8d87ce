# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What loading a part costs in answers: the reference model's questions, with recomputed tokens and without."""

from collections.abc import Callable
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.sparse.partial.loading import partial_loading
from hf_blend.sparse.partial.store import PartialStore

from ..bootstrap import interval
from ..bundled import load_model
from ..world.sampling import Example, sample_examples

BLOCK_TOKENS = 4
SHARES = (1.0, 0.5, 0.25, 0.1)
BLENDS: dict[str, dict[str, Any]] = {
    "kv-deviation 0.1": {"recompute_ratio": 0.1},
    "auto 0.05": {"selector": "auto", "recompute_ratio": 0.05},
}
ANSWER_TOKENS = 4


def measure_partial_quality(
    count: int = 100, seed: int = 21, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Exact match at every share, the question deciding or not.

    Args:
        count: questions.
        seed: which.
        progress: called with a line of text before each way.

    Returns:
        `rows`, paired with all KV loaded.
    """
    model, tokenizer = load_model()
    examples, rows = sample_examples(count, seed), []
    for blend, settings in BLENDS.items():
        store: Any = PartialStore(
            ChunkStore.open("memory://"), plugins.load("store.tiers", "memory")(), block_tokens=BLOCK_TOKENS
        )
        every: list[float] = []
        for share in SHARES:
            for by_question in (True, False) if share < 1 else (True,):
                if progress:
                    progress(f"{blend}, {share:.0%}, {'by question' if by_question else 'static'}")
                right, layers = _answers(model, tokenizer, store, examples, settings, share, by_question)
                every = every or right
                gaps = [new - old for new, old in zip(right, every, strict=True)]
                rows.append(
                    {
                        "blend": blend,
                        "share": share,
                        "by_question": by_question,
                        "n": count,
                        "exact_match": sum(right) / count,
                        "interval": interval(right),
                        "difference_interval": interval(gaps),
                        **layers,
                    }
                )
            store.reorder()
    return {"seed": seed, "block_tokens": BLOCK_TOKENS, "rows": rows}


@torch.no_grad()
def _answers(
    model: Any,
    tokenizer: Any,
    store: Any,
    examples: list[Example],
    settings: dict[str, Any],
    share: float,
    by_question: bool,
) -> tuple[list[float], dict[str, float]]:
    """1 for each right answer, 0 for the others; and the shares of layers and bytes."""
    right, totals = [], [0, 0, 0, 0, 0.0]
    for example in examples:
        chunks = [tokenizer.encode(chunk, add_special_tokens=False) for chunk in example.chunks]
        pieces = {"chunks": chunks, "question": tokenizer.encode(example.question, add_special_tokens=False)}
        for _ in range(2):  # the first time computes the chunks
            cache = BlendCache(model, store, **settings)
            with partial_loading(model, cache, share=share, by_question=by_question) as loading:
                inputs = cache.inputs(tokenizer, prefix=None, **pieces)
                ids = model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=ANSWER_TOKENS)
            if not cache.report.computed_chunks:
                break
        text = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right.append(float(text.strip() == example.answer))
        found = loading.report
        new = (found.partial_layers, found.fallback_layers, found.loaded_bytes, found.all_bytes, found.unseen_share)
        totals = [old + one for old, one in zip(totals, new, strict=True)]
    tried = max(1, totals[0] + totals[1])
    return right, {
        "fallback_share": totals[1] / tried,
        "layers_in_part": tried / len(examples),
        "loaded_share": totals[2] / max(1, totals[3]),
        "unseen_share": totals[4] / len(examples),
    }
