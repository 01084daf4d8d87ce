# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token where a policy of eviction decides what a slow tier must be asked for.

Chunks are in a store's tier that gives no more than a stated rate, and some of them, those that the policy holds, are
in memory in front of it. Each request is served by a `BlendCache` under every policy in turn, over a store that loads
chunks whole and over one that loads them in part, so a difference is that of one request. The slow tier sleeps: what
else the machine does changes the time of computing, which is the same for all, and not that of loading.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.evaluation.bootstrap import interval
from hf_blend.evaluation.throttled import ThrottledTier
from hf_blend.sparse.partial.loading import PartialLoading
from hf_blend.sparse.partial.store import BLOCK_TOKENS, PartialStore
from hf_blend.store import ChunkKey
from hf_blend.store.tiers.base import Source, WrappedTier

WAYS = ("whole", "part")
SHARE, ALPHA = 0.25, 0.6  # as `ChunkStore.open(partial=0.25)`

Times = dict[str, dict[str, list[tuple[float, int]]]]  # way → policy → ms and slow bytes of each request
Question = str | Sequence[int]


@dataclass(frozen=True)
class Served:
    """One request of a sample.

    Attributes:
        chunks: by number.
        question: text or token ids.
        held: policy → the chunks that are in memory when the request comes.
    """

    chunks: tuple[int, ...]
    question: Question
    held: Mapping[str, frozenset[int]]


class _CountedTier(ThrottledTier):
    read_bytes = 0

    def wait(self, nbytes: int, begun: float) -> None:
        self.read_bytes += nbytes
        super().wait(nbytes, begun)


class HeldTier(WrappedTier):
    """A tier of a bounded rate, with some of its objects in memory in front of it.

    Args:
        bytes_s: the rate.

    Attributes:
        slow: where the others are; counts the bytes that were read from it.
        held: names of the objects that are in memory; None is all of them.
    """

    def __init__(self, bytes_s: float) -> None:
        super().__init__(plugins.load("store.tiers", "memory")())
        self.slow = _CountedTier(self.tier, bytes_s)
        self.held: frozenset[str] | None = None

    def open(self, name: str) -> Source | None:
        """Open an object where it is."""
        return (self.tier if self.held is None or name in self.held else self.slow).open(name)


@torch.no_grad()
def serve(
    model: Any,
    tokenizer: Any,
    chunks: Sequence[tuple[int, ...]],
    known: Sequence[tuple[Sequence[int], Question]],
    samples: Mapping[float, Sequence[Served]],
    served_gb_s: float,
    progress: Callable[[str], None] | None = None,
) -> dict[float, Times]:
    """Serve samples of requests.

    Args:
        model: that answers.
        tokenizer: its tokenizer.
        chunks: token ids by number.
        known: chunks and question of earlier requests, whose attention orders the tokens of blocks.
        samples: the requests, by any name.
        served_gb_s: rate of the slow tier.
        progress: called with a line of text after each sample.

    Returns:
        For each sample the milliseconds to the first token of every request, and the bytes that it read from the
        slow tier, by way and policy.
    """
    tiers = {way: HeldTier(1e9 * served_gb_s) for way in WAYS}
    whole = ChunkStore([], [tiers["whole"]])
    loader = partial(PartialLoading, share=SHARE, alpha=ALPHA)
    part = PartialStore([], [tiers["whole"]]).keep_blocks(tiers["part"], BLOCK_TOKENS, loader)
    keys = part.add(model, None, chunks)
    for key in keys:
        part.stream(key, _never)  # writes its blocks
    stores: dict[str, Any] = {"whole": whole, "part": part}
    for asked, question in known:
        _ttft_ms(model, tokenizer, part, [chunks[one] for one in asked], question)
    part.reorder()
    found: dict[float, Times] = {}
    for name, sample in samples.items():
        found[name] = _served(model, tokenizer, chunks, keys, sample, stores, tiers)
        if progress:
            medians = {way: {policy: round(statistics.median(ms for ms, _ in some)) for policy, some in times.items()}
                       for way, times in found[name].items()}  # fmt: skip
            progress(f"memory for {name:.0%}, ms to the first token: {medians}")
    return found


def saved(times: Times, policy: str, best: str) -> dict[str, Any]:
    """What is said of a policy.

    Args:
        times: of one sample, or nothing.
        policy: which one.
        best: the one whose saving is said, of each request against this policy.

    Returns:
        Of each way the median of the times and the mean of the bytes; of the paired differences (this policy's time
        less that of `best`) the median, the mean and their intervals, in milliseconds.
    """
    found: dict[str, Any] = {}
    for way, by_policy in times.items():
        found[f"{way}_ttft_ms"] = statistics.median(ms for ms, _ in by_policy[policy])
        found[f"{way}_slow_bytes"] = statistics.mean(nbytes for _, nbytes in by_policy[policy])
        if policy == best:
            continue
        gaps = [old - new for (old, _), (new, _) in zip(by_policy[policy], by_policy[best], strict=True)]
        found[f"{way}_saved_ms"] = statistics.median(gaps)
        found[f"{way}_saved_ms_interval"] = interval(gaps, of_median=True)
        found[f"{way}_saved_mean_ms"] = statistics.mean(gaps)
        found[f"{way}_saved_mean_ms_interval"] = interval(gaps)
    return found


def _served(
    model: Any,
    tokenizer: Any,
    chunks: Sequence[tuple[int, ...]],
    keys: Sequence[ChunkKey],
    sample: Sequence[Served],
    stores: Mapping[str, Any],
    tiers: Mapping[str, HeldTier],
) -> Times:
    policies = list(sample[0].held)
    times: Times = {way: {policy: [] for policy in policies} for way in stores}
    for number, one in enumerate(sample):
        pieces = [chunks[chunk] for chunk in one.chunks]
        turn = number % len(policies)
        for way, store in stores.items():
            tiers[way].held = None
            _ttft_ms(model, tokenizer, store, pieces, one.question)  # warms up
            for policy in [*policies[turn:], *policies[:turn]]:
                tiers[way].held = frozenset(_name(store, keys[chunk]) for chunk in one.held[policy])
                before = tiers[way].slow.read_bytes
                ms, computed = _ttft_ms(model, tokenizer, store, pieces, one.question)
                if computed:
                    raise AssertionError(f"{computed} chunks were computed, expected all of them stored")
                times[way][policy].append((ms, tiers[way].slow.read_bytes - before))
    return times


def _name(store: Any, key: ChunkKey) -> str:
    """What a chunk is called in the tier of a store."""
    name: str = store.block_name(key.digest) if isinstance(store, PartialStore) else store._catalog.name(key.digest)
    return name


def _ttft_ms(
    model: Any, tokenizer: Any, store: Any, pieces: Sequence[Sequence[int]], question: Question
) -> tuple[float, int]:
    """Milliseconds to the first token, and how many chunks were computed."""
    cache = BlendCache(model, store)
    inputs = cache.inputs(tokenizer, chunks=pieces, question=question)
    started = time.perf_counter()
    model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=1)
    return 1e3 * (time.perf_counter() - started), cache.report.computed_chunks


def _never() -> Any:
    raise AssertionError("a chunk that was stored a moment ago is damaged")
