# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What looking at fewer blocks costs in answers: the reference model reads the question and answers step by step.

The documents are prefilled; the question's tokens go in one at a time, each looking at selected blocks only, so that
what the answer needs has to be found through them. Beside the reference world's own prompts stand needles: a whole
story among sentences that say nothing, up to the trained length.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from random import Random
from typing import Any

import torch
from self_extend import ANSWER_TOKENS, TRAINED_TOKENS, story_prompt

from hf_blend import BlendCache, ChunkStore, sparse_decoding
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import Example, sample_examples
from hf_blend.sparse.config import SparseConfig

BLOCK_TOKENS = 8
SHARES = (0.5, 0.25, 0.1)
LOCKS = ("never", "answer", "always")  # in which steps selections are held
TEXT_TOKENS = 32
DRAFTED_TOKENS = 4


def measure_sparse_quality(
    count: int = 200,
    methods: Sequence[str] = ("gsa", "mean-key", "kvstar", "quest"),
    seed: int = 11,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Exact match of dense and sparse steps, and how many drafted tokens are accepted.

    Args:
        count: questions.
        methods: that score blocks; the first at every share, the others at a quarter.
        seed: of stories and places.
        progress: called with a line of text before each way.

    Returns:
        `rows`, one for each task and way, paired with dense; `acceptance`, one for each way to draft.
    """
    model, tokenizer = load_model()
    examples = sample_examples(count, seed)
    rows, ways = [], [None, *product(methods[:1], SHARES, LOCKS), *product(methods[1:], SHARES[1:2], LOCKS)]
    for task, tokens in (("reference world", 0), ("needle", TRAINED_TOKENS)):
        random = Random(seed)
        prompts = [story_prompt(tokenizer, example, tokens, random) for example in examples]
        dense: list[float] = []
        for way in ways:
            if progress:
                progress(f"{task}: {'dense' if way is None else way}")
            right, mass = _answers(model, tokenizer, examples, prompts, way)
            dense = dense or right
            rows.append({"task": task, **_row(way, right, dense), "kept_mass": mass})
    drafts = [_drafted(model, tokenizer, examples[: max(1, count // 10)], *way) for way in DRAFTS]
    return {"seed": seed, "block_tokens": BLOCK_TOKENS, "rows": rows, "acceptance": drafts}


DRAFTS = (("shared", True), ("dense draft", True), ("dense draft", False))


def _config(method: str, share: float, lock: bool) -> SparseConfig:
    return SparseConfig(share, BLOCK_TOKENS, method, recent_blocks=1, min_tokens=0, lock=lock)


def _row(way: Any, right: list[float], dense: list[float]) -> dict[str, Any]:
    method, share, lock = way or ("dense", 1.0, None)
    return {
        "method": method,
        "share": share,
        "locked": lock,
        "n": len(right),
        "exact_match": sum(right) / len(right),
        "interval": interval(right),
        "difference_interval": interval([new - old for new, old in zip(right, dense, strict=True)]),
    }


@torch.no_grad()
def _answers(
    model: Any, tokenizer: Any, examples: list[Example], prompts: list[list[int]], way: tuple[str, float, str] | None
) -> tuple[list[float], float]:
    """1 for each right answer, 0 for the others; and the mean share of attention that was kept."""
    right, masses = [], []
    for example, prompt in zip(examples, prompts, strict=True):
        asked = len(tokenizer(example.question, add_special_tokens=False)["input_ids"])
        cache = BlendCache(model, ChunkStore.open("memory://"))
        model(torch.tensor([prompt[:-asked]]), past_key_values=cache)
        answer, mass = _stepped(model, cache, prompt[-asked:], way)
        right.append(float(tokenizer.decode(answer, skip_special_tokens=True).strip() == example.answer))
        masses += mass
    return right, sum(masses) / len(masses)


def _stepped(
    model: Any, cache: BlendCache, question: list[int], way: tuple[str, float, str] | None
) -> tuple[list[int], list[float]]:
    """The greedy answer, its question read one token at a time, and the share of attention kept in both."""
    answer: list[int] = []
    masses: list[float] = []
    parts = [(question, ANSWER_TOKENS, way is not None and way[2] == "always")]
    if way is not None and way[2] == "answer":
        parts = [(question[:-1], 0, False), (question[-1:], ANSWER_TOKENS, True)]
    for tokens, limit, lock in parts:
        door: AbstractContextManager[Any] = nullcontext()
        if way is not None:
            door = sparse_decoding(model, cache, _config(way[0], way[1], lock), watch_mass=True)
        with door as session:
            for token in tokens:
                logits = model(torch.tensor([[token]]), past_key_values=cache).logits
            while len(answer) < limit and model.generation_config.eos_token_id not in answer:
                answer.append(int(logits[0, -1].argmax()))
                logits = model(torch.tensor([answer[-1:]]), past_key_values=cache).logits
        masses += [session.kept_mass] if session and session.kept_mass is not None else []
    return answer, masses or [1.0]


def _drafted(model: Any, tokenizer: Any, examples: list[Example], how: str, lock: bool) -> dict[str, Any]:
    """How many tokens of a draft by the same model are accepted where the verification looks at a quarter."""
    draft, _ = load_model()
    draft.generation_config.num_assistant_tokens = DRAFTED_TOKENS
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    counts = [0, 0, 0]
    for example in examples:
        ids = torch.tensor([story_prompt(tokenizer, example, 0, Random(0))])
        cache = BlendCache(model, ChunkStore.open("memory://"))
        shared = draft if how == "shared" else None
        with sparse_decoding(model, cache, _config("gsa", 0.25, lock), draft=shared) as session:
            settings = {"do_sample": False, "eos_token_id": None, "assistant_model": draft}
            model.generate(ids, past_key_values=cache, max_new_tokens=TEXT_TOKENS, **settings)
        found = session.metrics.proposed, session.metrics.accepted, session.metrics.rounds
        counts = [old + new for old, new in zip(counts, found, strict=True)]
    return {
        "draft": how,
        "locked": lock,
        "proposed": counts[0],
        "acceptance": counts[1] / max(1, counts[0]),
        "rounds": counts[2],
    }
