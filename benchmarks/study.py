# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The study behind `selector="auto"`: methods on the reference world, and on worlds that were never trained on.

python benchmarks/study.py --world more-people --count 500 --output benchmarks/results/study.json

Worlds: `reference` as in training; `more-people` (six or seven instead of four or five); `longer-chunks` (two or three
chunks joined to one); `other-order` (the story is cut before somebody is introduced, and its second part told first).
Prompts are answered in batches, which changes no answer but gives no time to the first token.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, suggest
from hf_blend.evaluation.answering import FULL_PREFILL, FULL_REUSE, Method, blend_config, is_right
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.world.sampling import KIND_WEIGHTS, Example, examples_of, is_contested
from hf_blend.evaluation.world.story import Level, Story, tell

BATCH = 25
METHODS = ("auto@0.02", "auto@0.03", "auto@0.05", "auto@0.1", "auto@0.15", "kv-deviation:on=k@0.01", "random@0.15")


def as_told(story: Story, random: Random) -> Story:
    """The story as it is."""
    return story


def longer_chunks(story: Story, random: Random) -> Story:
    """Join two or three neighbouring chunks to one."""
    chunks, left = [], list(story.chunks)
    while left:
        size = random.choice((2, 3))
        chunks.append("".join(left[:size]))
        left = left[size:]
    return Story(tuple(chunks), story.facts)


def other_order(story: Story, random: Random) -> Story:
    """Tell the story from somebody's introduction on, then what came before."""
    named = {fact.subject: fact.chunk for fact in reversed(story.facts) if fact.told_by == "explicit"}
    start = random.choice(sorted(set(named.values()) - {0}) or [0])
    return Story(story.chunks[start:] + story.chunks[:start], story.facts)


WORLDS: dict[str, tuple[Level, Callable[[Story, Random], Story]]] = {
    "reference": (Level(), as_told),
    "more-people": (Level(people=(6, 7)), as_told),
    "longer-chunks": (Level(), longer_chunks),
    "other-order": (Level(), other_order),
}


def examples(world: str, count: int, seed: int) -> list[Example]:
    """Draw held-out questions about a world, kinds in the shares of the reference world.

    Args:
        world: one of `WORLDS`.
        count: how many.
        seed: which.

    Returns:
        The questions.

    Raises:
        ConfigError: there is no such world.
    """
    if world not in WORLDS:
        raise ConfigError(f"there is no world {world!r}. {suggest(world, WORLDS)}")
    random, (level, change) = Random(f"{world}-{seed}"), WORLDS[world]
    return [_example(random, level, change) for _ in range(count)]


def _example(random: Random, level: Level, change: Callable[[Story, Random], Story]) -> Example:
    kind = random.choices(list(KIND_WEIGHTS), list(KIND_WEIGHTS.values()))[0]
    while True:
        story = tell(random, level, heldout=True)
        fitting = [one for one in examples_of(story) if one.kind == kind and is_contested(story, one.answer)]
        if fitting:
            return replace(random.choice(fitting), chunks=change(story, random).chunks)


@torch.no_grad()
def score(
    model: nn.Module, tokenizer: Any, store: ChunkStore, asked: Sequence[Example], config: BlendConfig | None
) -> tuple[list[bool], float]:
    """Answer questions in batches.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        store: where chunks are kept.
        asked: the questions.
        config: how to blend; None is a full prefill.

    Returns:
        Which are right, and the mean charged budget.
    """
    rights, charged = [], 0.0
    for first in range(0, len(asked), BATCH):
        part = asked[first : first + BATCH]
        cache = BlendCache(model, store, config or FULL_REUSE.config)
        chunks, questions = [list(one.chunks) for one in part], [one.question for one in part]
        inputs = cache.inputs(tokenizer, prefix=None, chunks=chunks, question=questions)
        past = None if config is None else cache
        output = model.generate(**inputs, past_key_values=past, do_sample=False, max_new_tokens=4)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rights += [is_right(text.strip(), one.answer) for text, one in zip(texts, part, strict=True)]
        charged += len(part) * (1.0 if config is None else cache.report.charged_budget)
    return rights, charged / len(asked)


def method(text: str) -> Method:
    """Read `selector:option=value@ratio`.

    Args:
        text: what was typed.

    Returns:
        The method.

    Raises:
        ConfigError: there is no ratio behind the name.
    """
    name, at, ratio = text.rpartition("@")
    try:
        return Method(name, blend_config(name, recompute_ratio=float(ratio)))
    except ValueError as error:
        raise ConfigError(f"the method {text!r} has no ratio that can be read ({at}{ratio}): {error}.") from error


def rows(world: str, tried: Sequence[Method], asked: Sequence[Example], tell_row: Callable[[Any], None]) -> list[Any]:
    """Score methods on the same questions.

    Args:
        world: its name, for the rows.
        tried: the methods.
        asked: the questions.
        tell_row: is told each row.

    Returns:
        One row per method.
    """
    model, tokenizer = load_model()
    store, made, full = ChunkStore.open("memory://"), [], None
    for one in tried:
        rights, charged = score(model, tokenizer, store, asked, one.config)
        full = rights if full is None else full
        low, high = interval(rights)
        gap_low, gap_high = interval([float(own) - float(theirs) for own, theirs in zip(rights, full, strict=True)])
        task = "reference-world" if world == "reference" else f"reference-world/{world}"
        name, ratio = one.name.replace(" ", "-"), one.config.recompute_ratio if one.config else None
        row: dict[str, Any] = {"task": task, "model": "reference", "method": name, "ratio": ratio}
        row |= {"n": len(asked), "score": sum(rights) / len(rights), "low": low, "high": high}
        row |= {"share_of_full": sum(rights) / max(1, sum(full)), "gap_low": gap_low, "gap_high": gap_high}
        made.append({**row, "charged_budget": charged, "ttft_ms": None})
        tell_row(made[-1])
    return made


def _say(row: Any) -> None:
    sys.stderr.write(json.dumps(row) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """Run a part of the study and add its rows to the result file.

    Args:
        words: the command line; None is what was typed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="reference", help=f"one of {', '.join(WORLDS)}")
    parser.add_argument("--count", type=int, default=500, help="held-out questions")
    parser.add_argument("--seed", type=int, default=1, help="which questions")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="selector:option=value@ratio")
    parser.add_argument("--output", type=Path, help="JSON file; rows of the same world and seed are replaced")
    chosen = parser.parse_args(words)
    tried = [FULL_PREFILL, FULL_REUSE, *map(method, chosen.methods)]
    asked = examples(chosen.world, chosen.count, chosen.seed)
    made = rows(chosen.world, tried, asked, _say)
    made = [{**row, "seed": chosen.seed} for row in made]
    if chosen.output:
        known = json.loads(chosen.output.read_text("utf-8"))["rows"] if chosen.output.exists() else []
        place = (made[0]["task"], chosen.seed)
        known = [row for row in known if (row["task"], row.get("seed")) != place]
        chosen.output.write_text(json.dumps({"rows": known + made}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
