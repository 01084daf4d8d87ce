# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An honest upper bound: the smallest set of tokens, found greedily, that restores the answer of a full prefill.

python benchmarks/greedy.py --count 200 --output benchmarks/results/greedy.json

For each question tokens are added one at a time, each time the one that brings the answer of the full prefill nearest,
until it is the answer; then those that turn out not to be needed are taken out again. All candidates of one step run
as a batch. The search sees the answer, so no rule can be expected to reach it, and it is greedy, so smaller sets may
exist: it bounds rules from above and the optimum from below.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import PromptError
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import pieces_of, sample_examples

RATIOS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15)
BATCH = 64


@dataclass(frozen=True)
class Prompt:
    """A prompt with the KV of full reuse, and what a full prefill answers.

    Attributes:
        ids: `[1, tokens]`.
        stale: (K, V) of each layer in full reuse, `[1, kv_heads, tokens, head_dim]`.
        reusable: the columns that may be repaired.
        question: the columns behind the last chunk.
        target: the token that a full prefill answers with.
    """

    ids: Tensor
    stale: tuple[tuple[Tensor, Tensor], ...]
    reusable: list[int]
    question: list[int]
    target: int


@torch.no_grad()
def prompt_of(model: nn.Module, tokenizer: Any, store: ChunkStore, pieces: dict[str, Any]) -> Prompt:
    """Run a prompt by full reuse and by full prefill.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        store: where chunks are kept.
        pieces: `prefix`, `chunks` and `question`, as `BlendCache.inputs` takes them.

    Returns:
        What the search needs.

    Raises:
        PromptError: nothing of the prompt can be reused.
    """
    everything = BlendCache(model, store, selector="full", recompute_ratio=1.0)
    inputs = everything.inputs(tokenizer, **pieces)
    target = int(model(**inputs, past_key_values=everything, logits_to_keep=1).logits[0, -1].argmax())
    if not everything.report.chosen_columns:
        raise PromptError(f"nothing of {pieces['chunks']!r:.80} can be reused. Give two chunks or more.")
    reusable = everything.report.chosen_columns[0]
    cache = BlendCache(model, store, selector="none", recompute_ratio=0.0)
    inputs = cache.inputs(tokenizer, **pieces)
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    layers: list[Any] = list(cache.layers)
    stale = tuple((layer.keys.clone(), layer.values.clone()) for layer in layers)
    ids = inputs["input_ids"]
    return Prompt(ids, stale, reusable, list(range(reusable[-1] + 1, ids.shape[1])), target)


@torch.no_grad()
def margins(model: nn.Module, prompt: Prompt, sets: Sequence[Sequence[int]]) -> Tensor:
    """How far the target is ahead of all other tokens when some tokens are recomputed.

    Args:
        model: the model.
        prompt: the prompt.
        sets: columns to recompute, all sets of equal size.

    Returns:
        `[sets]`: logit of the target minus the highest other; above 0 it is the answer.
    """
    found = []
    for first in range(0, len(sets), BATCH):
        logits = _run(model, prompt, sets[first : first + BATCH])
        target = logits[:, prompt.target].clone()
        logits[:, prompt.target] = -torch.inf
        found.append(target - logits.amax(dim=1))
    return torch.cat(found)


def _run(model: nn.Module, prompt: Prompt, sets: Sequence[Sequence[int]]) -> Tensor:
    """Logits behind the prompt, `[sets, vocabulary]`; each row sees stale K/V of what its set does not hold."""
    context = prompt.question[0]
    rows = torch.tensor([sorted(one) + prompt.question for one in sets])
    cache = DynamicCache()
    for layer, states in enumerate(prompt.stale):
        keys, values = (part[:, :, :context].expand(len(sets), -1, -1, -1).clone() for part in states)
        cache.update(keys, values, layer)
    old = torch.ones(len(sets), context, dtype=torch.bool)
    for place, one in enumerate(sets):
        old[place, list(one)] = False
    behind = old[:, None] & (torch.arange(context) <= rows[:, :, None])
    mask = torch.cat((behind, rows[:, None] <= rows[:, :, None]), dim=2)[:, None]
    output = model(prompt.ids[0][rows], position_ids=rows, past_key_values=cache, attention_mask=mask)
    logits: Tensor = output.logits[:, -1].clone()
    return logits


def smallest_set(model: nn.Module, prompt: Prompt, most: int = 24) -> list[int] | None:
    """Search greedily.

    Args:
        model: the model.
        prompt: the prompt.
        most: give up at so many tokens.

    Returns:
        The columns, in the order in which they were found; None if none were found.
    """
    chosen: list[int] = []
    ahead = float(margins(model, prompt, [chosen])[0])
    while ahead <= 0 and len(chosen) < most:
        left = [column for column in prompt.reusable if column not in chosen]
        scores = margins(model, prompt, [[*chosen, column] for column in left])
        ahead = float(scores.max())
        chosen.append(left[int(scores.argmax())])
    for column in list(chosen) if ahead > 0 else []:
        fewer = [one for one in chosen if one != column]
        if float(margins(model, prompt, [fewer])[0]) > 0:
            chosen = fewer
    return chosen if ahead > 0 else None


def main(words: Sequence[str] | None = None) -> None:
    """Run the search and write its result file.

    Args:
        words: the command line; None is what was typed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="held-out questions")
    parser.add_argument("--seed", type=int, default=1, help="which questions")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(words)
    model, tokenizer = load_model()
    store, found = ChunkStore.open("memory://"), []
    for example in sample_examples(chosen.count, chosen.seed):
        prompt = prompt_of(model, tokenizer, store, pieces_of(example))
        needed = smallest_set(model, prompt)
        texts = [tokenizer.decode([int(prompt.ids[0, column])]) for column in needed or []]
        found.append({"kind": example.kind, "reusable": len(prompt.reusable), "columns": needed, "tokens": texts})
    text = json.dumps({"count": chosen.count, "seed": chosen.seed, "rows": rows(found), "examples": found}, indent=1)
    if chosen.output:
        chosen.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(rows(found)) + "\n")


def rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At each ratio the share of questions whose full-prefill answer the found set restores.

    Args:
        found: `reusable` and `columns` of each question.

    Returns:
        One row per ratio, with its interval.
    """
    made = []
    for ratio in RATIOS:
        reached = [
            one["columns"] is not None and len(one["columns"]) <= math.ceil(round(ratio * one["reusable"], 6))
            for one in found
        ]
        low, high = interval(reached)
        share = sum(reached) / len(reached)
        made.append({"method": "greedy", "ratio": ratio, "restored": share, "low": low, "high": high, "n": len(found)})
    return made


if __name__ == "__main__":
    main()
