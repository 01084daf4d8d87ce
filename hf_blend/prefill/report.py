# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request cost: tokens, FLOPs and times; and what is said where a prompt and a store do not fit each other."""

import logging
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..model.anatomy import LayerCost
from ..store import ChunkStore

Charge: TypeAlias = float | Tensor | Callable[[], float]

NOTHING_REUSED = "no stored chunk is reused: "  # before a reason

OTHER_IDS = (
    "the model was called with other ids than those of the prompt that inputs() built, so only stored chunks are "
    "reused, wherever they are found. Pass what inputs() returned."
)

IMAGES_AGAIN = "tokens of a later prompt stand for images and are computed again: pass its pixel_values to generate."

UNEVEN = (
    "some stored chunks are computed: their position_ids do not count up by 1, so their tokens are at other distances "
    "from each other than they were stored at. Leave position_ids out, or let them count up by 1 inside each chunk."
)


@dataclass(frozen=True)
class Work:
    """What one layer computed. Nothing is counted before a figure is asked for."""

    layer: int
    kv_only: bool  # it ran only until its K and V were known
    columns: Tensor | None  # `[batch, rows]`, those among the new tokens that it ran for; None for all
    reusable: Tensor  # `[batch, tokens]`, True where stored KV is not exact: the budget is about these
    real: Tensor  # `[batch, tokens]`, True where there is no padding
    past: int = 0  # tokens in the cache before these

    @property
    def active_columns(self) -> Tensor:
        """`[batch, tokens]`: the columns that the layer ran for."""
        if self.columns is None:
            return torch.ones_like(self.real)
        return torch.zeros_like(self.real).scatter_(1, self.columns, True)


@dataclass(frozen=True)
class Advice:
    """What to do with a request, and what is expected of it."""

    ratio: float
    loaded_chunks: int
    predicted_ms: float
    load_ms: float
    compute_ms: float
    loaded: tuple[int, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"recompute {self.ratio:.1%}, load {self.loaded_chunks} chunks: {self.predicted_ms:.0f} ms expected "
            f"(loading {self.load_ms:.0f} ms, computing {self.compute_ms:.0f} ms)"
        )


@dataclass
class BlendReport:
    """Tokens, charged budget and time of one prefill.

    Attributes:
        nominal_ratio: the `recompute_ratio` of the request: a share of the reusable tokens.
        prompt_tokens: tokens of the prompt without padding, all rows of a batch.
        reusable_tokens: those with stored KV that is not exact; some of them are recomputed.
        exact_tokens: those with stored KV that equals a full prefill's.
        moved_tokens: reusable tokens that were moved inside the cache, because they come after an edit.
        healed_tokens: those that `BlendCache.heal` made exact since.
        computed_chunks: missing chunks that were computed and stored.
        loaded_chunks: chunks from the store.
        refused_chunks: chunks whose stored KV failed a check; these are computed.
        realign_ms: host time for moving stored KV.
        select_ms: host time for scoring and selecting.
        compute_ms: host time for computing missing chunks.
        store_ms: host time for storing them.
        check_ms: host time for checking that this model computed the stored chunks, and for the self-test of a new
            model.
        past_tokens: tokens in the cache before this prefill.
        seam_tokens: tokens at chunks' edges that the tokenizer made differently in this prompt; they are computed.
        partial: where chunks are loaded in part: layers, loaded bytes, all bytes.
        sparse: where decoding attends to some blocks only: the figures of `SparseMetrics`.
        advice: what the store's controller decided.
        quantisation_noise: how far the logits of two plain prefills of a quantised model differ, as a share of
            their size.
        recipe: where selector and ratio are from: the caller, the store, or the default.
        notice: what else to know, such as that the chunks were stored with another tokenizer.
        fallback_reason: why every token was computed, and what to pass instead; else empty.
    """

    nominal_ratio: float = 0.0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    exact_tokens: int = 0
    moved_tokens: int = 0
    healed_tokens: int = 0
    computed_chunks: int = 0
    loaded_chunks: int = 0
    refused_chunks: int = 0
    realign_ms: float = 0.0
    select_ms: float = 0.0
    compute_ms: float = 0.0
    store_ms: float = 0.0
    check_ms: float = 0.0
    past_tokens: int = 0
    seam_tokens: int = 0
    partial: dict[str, float] | None = None
    sparse: dict[str, int] | None = None
    advice: dict[str, Any] | None = None
    quantisation_noise: float = 0.0
    recipe: str = ""
    notice: str = ""
    fallback_reason: str = ""
    # of each part of a prompt the choice: columns and what is chosen of them, `[batch, rows]`, and past tokens
    _chosen: list[list[list[int]] | tuple[Tensor, Tensor, int]] = field(default_factory=list, repr=False)
    _charges: list[Charge] = field(default_factory=list, repr=False)
    _costs: list[LayerCost] = field(default_factory=list, repr=False)
    _work: list[Work] = field(default_factory=list, repr=False)

    def __copy__(self) -> "BlendReport":
        """The figures as they are now; what is added later is added to one of the two."""
        figures: Any = {name: [*value] if isinstance(value, list) else value for name, value in vars(self).items()}
        return BlendReport(**figures)

    def charge(self, flops: Charge) -> None:
        """Add FLOPs of selecting that no layer spends; a tensor is read when a figure is asked for."""
        self._charges.append(flops)

    @property
    def scoring_flops(self) -> float:
        """FLOPs spent to choose and to correct beside the work of the layers: attention scores, probes, shifts."""
        return sum(float(flops() if callable(flops) else flops) for flops in self._charges)

    @property
    def chosen_columns(self) -> list[list[int]]:
        """For each batch entry the reusable columns that are recomputed; asks the device once."""
        parts = []
        for number, chosen in enumerate(self._chosen):
            if isinstance(chosen, tuple):
                columns, selected, past = chosen
                chosen = [row[keep].tolist() for row, keep in zip((columns + past).cpu(), selected.cpu(), strict=True)]
                self._chosen[number] = chosen
            parts.append(chosen)
        return [[column for row in rows for column in row] for rows in zip(*parts, strict=True)]

    @property
    def reused_tokens(self) -> int:
        """Tokens whose stored KV was used as it is; asks the device once."""
        return self.exact_tokens + self.reusable_tokens - sum(map(len, self.chosen_columns))

    @property
    def flops(self) -> float:
        """FLOPs of the decoder in this prefill, with choosing."""
        return sum(self._spent(work, work.real) for work in self._work) + self.scoring_flops

    @property
    def charged_budget(self) -> float:
        """FLOPs spent on the reusable tokens, divided by those of their full prefill; 0 if there are none."""
        full = sum(self._costs[work.layer].of_all(self._columns(work, work.reusable)) for work in self._layers())
        spent = sum(self._spent(work, work.reusable) for work in self._work)
        return (spent + self.scoring_flops) / full if full else 0.0

    @property
    def flop_bound(self) -> float:
        """FLOPs of a full prefill over `flops`: how much faster this prefill could be."""
        full = sum(self._costs[work.layer].of_all(self._columns(work, work.real)) for work in self._layers())
        return full / self.flops if self.flops else 1.0

    def _layers(self) -> list[Work]:
        """One entry per layer, and per part of a prompt that came in parts."""
        return [work for work in self._work if not work.kv_only]

    def _spent(self, work: Work, tokens: Tensor) -> float:
        """FLOPs spent on some tokens: on those of them that the layer ran for, and in its mixer on all."""
        cost, active = self._costs[work.layer], work.active_columns & tokens
        if work.kv_only:
            return cost.before_kv * int(active.sum())
        every = cost.always * int(tokens.sum()) if cost.always else 0.0
        return cost.of_columns(self._columns(work, active)) + every

    @staticmethod
    def _columns(work: Work, tokens: Tensor) -> Tensor:
        """How many tokens are before each token, in its row and in the cache."""
        return tokens.nonzero()[:, 1] + work.past

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        names = [entry.name for entry in fields(self) if not entry.name.startswith("_")]
        names += ["scoring_flops", "chosen_columns", "charged_budget", "flop_bound"]
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """One line for people."""
        if self.fallback_reason:
            return f"{self.prompt_tokens} tokens, all computed: {self.fallback_reason}"
        new = self.prompt_tokens - self.exact_tokens - self.reusable_tokens
        recomputed = sum(map(len, self.chosen_columns))
        parts = [
            f"{self.prompt_tokens} tokens: {new} new, {self.exact_tokens} exact, {self.reusable_tokens} reusable, of "
            f"which {recomputed} recomputed (ratio {self.nominal_ratio:.0%}, cost {self.charged_budget:.1%})",
            f"{self.loaded_chunks} chunks loaded, {self.computed_chunks} computed",
        ]
        if self.past_tokens:
            parts[0] = f"{self.past_tokens} tokens kept, then {parts[0]}"
        if self.moved_tokens:
            parts.append(f"{self.moved_tokens} of them moved behind an edit")
        if self.seam_tokens:
            parts.append(f"{self.seam_tokens} of their tokens differ where texts meet, and are computed")
        if self.partial:
            loaded, every = self.partial["loaded_bytes"], self.partial["all_bytes"]
            parts.append(f"{loaded:,} of {every:,} bytes loaded in part")
        if self.advice:
            parts.append(f"{self.advice['loaded_chunks']} worth loading by the controller")
        times = f"check {self.check_ms:.1f} ms, realign {self.realign_ms:.1f} ms, select {self.select_ms:.1f} ms"
        if self.computed_chunks:
            times = f"compute {self.compute_ms:.1f} ms, store {self.store_ms:.1f} ms, {times}"
        parts.append(times)
        if self.quantisation_noise:
            parts.append(f"quantisation alone changes the model's logits by up to {self.quantisation_noise:.1%}")
        if self.notice:
            parts.append(self.notice)
        return "; ".join(parts)


@cache
def warn_once(notice: str) -> None:
    """Log a notice as a warning, once for each text in this process."""
    logging.getLogger(__name__).warning("%s", notice)


EMPTY = "the store is empty. Add the documents, or name them when the prompt is built."
ONE_TOKEN = "the prompt is one token, which is always computed."


def why_nothing_found(store: ChunkStore, fingerprint: str, chunk_prefix_ids: Sequence[int], tokenizer: str) -> str:
    """Why nothing of a prompt is in a store."""
    here, everywhere = store.known(fingerprint)
    if not everywhere:
        return EMPTY
    if not here:
        return (
            f"the store holds {everywhere} chunks, but none of this model: weights, adapter or code are others. Add "
            "the documents with this model."
        )
    key = store.sample(fingerprint, chunk_prefix_ids)
    other = store.sample(fingerprint, store.longest_prefix(fingerprint)) if key is None else key
    chunk = store.get(other) if tokenizer and other is not None else None
    stored = {tokenizer, ""} if chunk is None else {chunk.tokenizer}
    named = other_tokenizers(stored, tokenizer) if stored.isdisjoint((tokenizer, "")) else ""
    if key is None and not named:
        return (
            f"the store holds {here} chunks of this model, but none behind chunk_prefix_ids="
            f"{reprlib.repr(tuple(chunk_prefix_ids))}. Use the chunk_prefix_ids that they were added with, or the "
            "tokenizer: without one chunks are behind BOS alone."
        )
    return f"the store holds {here} chunks of this model, but none of them is in the prompt. " + (
        f"{named[0].upper()}{named[1:]}" if named else "Put the documents into it as they were added."
    )


def other_tokenizers(others: Iterable[str], tokenizer: str) -> str:
    """Name the tokenizers that chunks were stored with, which are not the prompt's."""
    return (
        f"chunks were stored with another tokenizer ({', '.join(sorted(others))}) than this one ({tokenizer}): their "
        "ids may not be in its prompts. Add the documents with the tokenizer that is used."
    )


def too_small(kept_ratio: float) -> str:
    """Say that a store has no room for all chunks of a prompt."""
    return (
        f"the store has room for {kept_ratio:.0%} of this prompt's chunks: the others are computed for every prompt "
        "that has them. Give ChunkStore.open more memory_bytes or disk_bytes."
    )


def other_author(cached: int, computed: int) -> str:
    """Say how many of the cached tokens are computed again; empty where none is."""
    if computed <= 0:
        return ""
    return (
        f"{computed} of {cached} tokens that were held are computed again: the model was another one when it computed "
        "them (adapter, weights, dtype, code or attention)."
    )
