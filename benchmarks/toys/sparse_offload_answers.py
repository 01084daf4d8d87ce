# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What sparse decoding from disk costs in answers: the chain model reads the question step by step.

The chunks are prefilled, about 1,400 tokens; the tokens of the question go in one at a time, each looking at selected
blocks only, so that what the answer needs has to be found through them. Every way answers each question from the same
K and V.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore, sparse_decoding
from hf_blend.evaluation.answering import is_right
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import CHAINS, load_model
from hf_blend.evaluation.chains.sampling import Example, sample_examples
from hf_blend.sparse.config import SparseConfig

BLOCK_TOKENS, ANSWER_TOKENS = 16, 3

Way = tuple[str, float, bool] | None  # method, share and whether selections are held; None: dense


@torch.no_grad()
def measure_sparse_offload_answers(
    count: int = 200,
    shares: Sequence[float] = (0.5, 0.25, 0.1),
    methods: Sequence[str] = ("gsa", "mean-key"),
    seed: int = 31,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Answers of dense and of sparse steps, from K and V on disk, paired with dense.

    Args:
        count: questions.
        shares: of the blocks that are looked at.
        methods: that score blocks; the first at every share, and at a quarter unlocked, too; the others at a quarter.
        seed: of the stories.
        progress: called with a line of text now and then.

    Returns:
        `rows`, one for each way.
    """
    model, tokenizer = load_model(CHAINS)
    ways: list[Way] = [None, *((methods[0], share, True) for share in shares), (methods[0], 0.25, False)]
    ways += [(method, 0.25, True) for method in methods[1:]]
    right: dict[Way, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(sample_examples(count, seed)):
            if progress and number % 20 == 0:
                progress(f"{number} of {count} questions")
            cache = BlendCache(model, ChunkStore.open("memory://"), kv_device_map="disk", offload_folder=folder)
            asked = _prefilled(model, tokenizer, cache, one)
            for way in ways:
                answer = _stepped(model, cache, asked, way)
                right[way].append(float(is_right(tokenizer.decode(answer, skip_special_tokens=True), one.answer)))
    rows = [_row(way, right[way], right[None]) for way in ways]
    return {"seed": seed, "block_tokens": BLOCK_TOKENS, "model": "chains", "rows": rows}


def _prefilled(model: Any, tokenizer: Any, cache: BlendCache, one: Example) -> list[int]:
    """The cache holds BOS and the chunks; gives the tokens of the question."""
    ids = [tokenizer.bos_token_id]
    for text in one.chunks:
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
    found: list[int] = tokenizer(one.question, add_special_tokens=False)["input_ids"]
    return found


def _stepped(model: Any, cache: BlendCache, asked: Sequence[int], way: Way) -> list[int]:
    """The greedy answer, its question read one token at a time; the cache is as before."""
    before, answer = cache.get_seq_length(), []
    decoding: AbstractContextManager[Any] = nullcontext()
    if way is not None:
        method, share, lock = way
        config = SparseConfig(share, BLOCK_TOKENS, method, recent_blocks=1, min_tokens=0, lock=lock)
        decoding = sparse_decoding(model, cache, config)
    with decoding:
        for token in asked:
            logits = model(torch.tensor([[token]]), past_key_values=cache).logits
        for _ in range(ANSWER_TOKENS):
            answer.append(int(logits[0, -1].argmax()))
            if answer[-1] == model.generation_config.eos_token_id:
                break
            logits = model(torch.tensor([answer[-1:]]), past_key_values=cache).logits
    cache.crop(before - cache.get_seq_length())
    return answer


def _row(way: Way, right: list[float], dense: list[float]) -> dict[str, Any]:
    method, share, lock = way or ("dense", 1.0, None)
    return {
        "method": method,
        "share": share,
        "locked": lock,
        "n": len(right),
        "right": sum(right) / len(right),
        "interval": interval(right),
        "difference": (sum(right) - sum(dense)) / len(right),
        "difference_interval": interval([new - old for new, old in zip(right, dense, strict=True)]),
    }
