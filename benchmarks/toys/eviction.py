# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What stays in a full memory tier under Zipf traffic, when importance is that of a trained model's real requests.

First the model answers questions about stories of chunks, over a store that notes what the questions look at.
Then these requests come again and again, stories drawn by Zipf's law, in front of a memory tier that holds a part of
all chunks; the book-keeping and the policies are the store's own. What is missed is loaded from a slower tier: whole,
or (IMPRESS) only the important tokens. Over all of this traffic the time that loading takes before a first token is
counted: the bytes at a stated rate, nothing of it hidden. Of a sample of the requests it is measured: `eviction_ttft`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from eviction_ttft import Served, Times, saved, serve

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.chains.sampling import LONG, texts
from hf_blend.evaluation.chains.story import question, tell
from hf_blend.store.budget import Budget

POLICIES = ("lru", "lfu", "importance")
NEW_SHARE = 0.2  # as in `hf_blend.store.importance`


@dataclass(frozen=True)
class EvictionPlan:
    """What is measured.

    Attributes:
        model: "chains", or a folder of a model with its tokenizer.
        stories: whose chunks are the corpus.
        questions: about each story, whose attention is recorded.
        requests: of one run of traffic.
        seeds: runs, each with its own order of stories and draws.
        zipf: the n-th story is drawn with a weight of 1 / n to this power.
        caps: of the memory tier, as shares of all chunks' bytes.
        rate_gb_s: of the slower tier.
        served: requests of each cap that are served under every policy; 0 measures no first-token times.
        served_gb_s: of the slower tier when they are served.
    """

    model: str = "chains"
    stories: int = 24
    questions: int = 4
    requests: int = 1000
    seeds: int = 10
    zipf: float = 1.0
    caps: tuple[float, ...] = (0.1, 0.3)
    rate_gb_s: float = 0.5
    served: int = 0
    served_gb_s: float = 0.02


@dataclass(frozen=True)
class Request:
    """One recorded request: its chunks by number, which share of each was important, and what was asked."""

    chunks: tuple[int, ...]
    shares: tuple[float, ...]
    question: str


@dataclass(frozen=True)
class Recorded:
    """What a model's answers left behind.

    Attributes:
        requests: of each story.
        chunks: token ids of each chunk, by number.
        sizes: of the chunks in bytes.
    """

    requests: dict[int, list[Request]]
    chunks: list[tuple[int, ...]]
    sizes: list[int]


def measure_eviction(plan: EvictionPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Record the requests, and replay them under every policy.

    Args:
        plan: what to measure.
        progress: called with a line of text now and then.

    Returns:
        `rows`, one for each cap and policy; `differences` of "importance" to the others, paired by seed.
    """
    model, tokenizer = load_model(plan.model)
    recorded = record(plan, model, tokenizer, progress)
    requests, sizes = recorded.requests, recorded.sizes
    rows, differences = [], []
    served = _serve(plan, recorded, model, tokenizer, progress) if plan.served else {}
    for cap in plan.caps:
        found = {policy: [replay(plan, policy, cap, seed, requests, sizes) for seed in range(plan.seeds)]
                 for policy in POLICIES}  # fmt: skip
        for runs in found.values():
            for run in runs:
                for way in ("whole", "part"):
                    run[f"{way}_load_ms"] = 1e3 * run[f"{way}_bytes"] / plan.requests / (plan.rate_gb_s * 1e9)
        times = served.get(cap, {})
        rows += [
            {"cap": cap, "policy": policy, **_means(runs), **saved(times, policy, POLICIES[-1])}
            for policy, runs in found.items()
        ]
        for other in POLICIES[:-1]:
            gaps = {
                name: [new[name] - old[name] for new, old in zip(found["importance"], found[other], strict=True)]
                for name in found[other][0]
            }
            mean = {name: statistics.mean(gap) for name, gap in gaps.items()}
            ends = {f"{name}_interval": interval(gap) for name, gap in gaps.items()}
            differences.append({"cap": cap, "to": other, **mean, **ends})
        if progress:
            progress(f"cap {cap:.0%}: {[(row['policy'], round(row['hit_rate'], 4)) for row in rows[-3:]]}")
    ratios = [share for one in requests.values() for each in one for share in each.shares]
    about = {
        "chunks": len(sizes),
        "corpus_bytes": sum(sizes),
        "share_mean": statistics.mean(ratios),
        "share_deviation": statistics.pstdev(ratios),
    }
    about |= {"threads": torch.get_num_threads()} if plan.served else {}
    return {**vars(plan), **about, "rows": rows, "differences": differences}


@torch.no_grad()
def record(plan: EvictionPlan, model: Any, tokenizer: Any, progress: Callable[[str], None] | None = None) -> Recorded:
    """Let the model answer, and note what its questions look at.

    Args:
        plan: what to measure.
        model: of the plan.
        tokenizer: its tokenizer.
        progress: called with a line of text after each story.

    Returns:
        The requests, and the chunks that they are about.
    """
    requests: dict[int, list[Request]] = {}
    pieces: list[tuple[int, ...]] = []
    sizes: list[int] = []
    for number in range(plan.stories):
        random = Random(f"eviction-{number}")
        story = tell(random, LONG, "heldout")
        facts = random.sample(story.facts, min(plan.questions, len(story.facts)))
        with ChunkStore.open("memory://", eviction="importance") as store:
            told: dict[tuple[int, ...], float] = {}
            store.note = _heard(told)  # type: ignore[method-assign]
            chunks = [tuple(tokenizer(one, add_special_tokens=False)["input_ids"]) for one in texts(story)]
            keys = store.add(model, None, chunks)
            first, pieces = len(sizes), [*pieces, *chunks]
            sizes += [chunk.nbytes for key in keys if (chunk := store.get(key)) is not None]
            for fact in facts:
                told.clear()
                cache = BlendCache(model, store)
                asked = " ".join(question(fact.thing))
                inputs = cache.inputs(tokenizer, chunks=chunks, question=asked)
                model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=1)
                shares = tuple(told.get(chunk, 0.0) for chunk in chunks)
                numbers = tuple(range(first, first + len(chunks)))
                requests.setdefault(number, []).append(Request(numbers, shares, asked))
        if progress:
            progress(f"story {number + 1} of {plan.stories}")
    return Recorded(requests, pieces, sizes)


def _heard(told: dict[tuple[int, ...], float]) -> Callable[..., None]:
    """Takes the place of `ChunkStore.note`."""

    def note(key: Any, scores: Any, important_ratio: float) -> None:
        told[key.token_ids] = important_ratio

    return note


def _serve(
    plan: EvictionPlan,
    recorded: Recorded,
    model: Any,
    tokenizer: Any,
    progress: Callable[[str], None] | None,
) -> dict[float, Times]:
    """First-token times of a sample of the traffic: of each cap, see `serve`."""
    asked = {cap: _sample(plan, cap, recorded) for cap in plan.caps}
    every = [request for one in recorded.requests.values() for request in one]
    known = [(request.chunks, request.question) for request in every]
    return serve(model, tokenizer, recorded.chunks, known, asked, plan.served_gb_s, progress)


def _sample(plan: EvictionPlan, cap: float, recorded: Recorded) -> list[Served]:
    """Requests from the second halves of all runs in turn, and what each policy holds when they come."""
    found: list[Served] = []
    for seed in range(min(plan.seeds, plan.served)):
        count = len(range(seed, plan.served, plan.seeds))
        places = [plan.requests - 1 - number * (plan.requests // 2) // count for number in range(count)]
        seen: dict[str, dict[int, tuple[Request, frozenset[int]]]] = {policy: {} for policy in POLICIES}
        for policy, requests in seen.items():
            watch = partial(_note, requests, places)
            replay(plan, policy, cap, seed, recorded.requests, recorded.sizes, watch)
        for place in places:
            request = seen[POLICIES[0]][place][0]
            held = {policy: requests[place][1] for policy, requests in seen.items()}
            found.append(Served(request.chunks, request.question, held))
    return found


def _note(
    seen: dict[int, tuple[Request, frozenset[int]]],
    places: Sequence[int],
    place: int,
    request: Request,
    held: set[int],
) -> None:
    if place in places:
        seen[place] = request, frozenset(held)


def replay(
    plan: EvictionPlan,
    policy: str,
    cap: float,
    seed: int,
    requests: dict[int, list[Request]],
    sizes: Sequence[int],
    watch: Callable[[int, Request, set[int]], None] | None = None,
) -> dict[str, float]:
    """Zipf traffic in front of a memory tier.

    Args:
        plan: what to measure.
        policy: name of the policy.
        cap: of the tier, as a share of all bytes.
        seed: of the order of stories and of the draws.
        requests: of each story.
        sizes: of the chunks in bytes.
        watch: receives the number of each request, the request, and the chunks that are held before it.

    Returns:
        `hit_rate` of chunks and `important_hit_rate` of important tokens, and the bytes of what was missed: whole, and
        of the important tokens alone (`part`).
    """
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, len(requests) + 1) ** plan.zipf
    ranked = random.permutation(len(requests))
    draws = ranked[random.choice(len(requests), plan.requests, p=weights / weights.sum())]
    budget = Budget(int(cap * sum(sizes)), plugins.load("store.eviction", policy)())
    held: set[int] = set()
    known: dict[int, float] = {}
    hits = asked = 0
    important = {"all": 0.0, "hit": 0.0}
    missed = {"whole_bytes": 0.0, "part_bytes": 0.0}
    for number, story in enumerate(draws.tolist()):
        request = requests[story][random.integers(len(requests[story]))]
        if watch is not None:
            watch(number, request, held)
        for chunk, share in zip(request.chunks, request.shares, strict=True):
            asked, weight = asked + 1, share * sizes[chunk]
            important["all"] += weight
            if chunk in held:
                hits += 1
                important["hit"] += weight
                budget.use(str(chunk))
            else:
                missed["whole_bytes"] += sizes[chunk]
                missed["part_bytes"] += weight
                for name in budget.victims(sizes[chunk]):
                    budget.remove(name)
                    held.discard(int(name))
                budget.add(str(chunk), sizes[chunk])
                held.add(chunk)
                if chunk in known and budget.reads_importance:
                    budget.use(str(chunk), known[chunk])
        for chunk, share in zip(request.chunks, request.shares, strict=True):
            known[chunk] = share if chunk not in known else known[chunk] + NEW_SHARE * (share - known[chunk])
            if budget.reads_importance:
                budget.use(str(chunk), share)
    return {"hit_rate": hits / asked, "important_hit_rate": important["hit"] / important["all"], **missed}


def _means(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    means: dict[str, Any] = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
    return {**means, **{f"{name}_interval": interval([run[name] for run in runs]) for name in runs[0]}}
