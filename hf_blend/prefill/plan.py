# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Which columns of a prompt have stored KV: found by content, checked, computed where missing.

The tokens of a stored chunk were computed one position apart. Where they are so in a prompt, its keys are rotated to
their new positions; where all tokens before it are so too, it may be exact. With a gap, a stride or another order
inside, its tokens attend to each other over other distances: above layer 0 its K and V are not the stored ones, and no
rotation of keys corrects that. Such a chunk is computed, like one that padding divides.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..config import BlendConfig
from ..model.anatomy import text_config
from ..model.capture import canary_of, compute_chunks, is_of_model, layout_of
from ..model.identity import fingerprint
from ..prompt.pieces import Span
from ..rotary.base import frequency_regime, scales_by_position
from ..store import ChunkStore
from ..store.chunk import CHAIN, ChunkKey, ChunkKV, ChunkSpan
from ..store.stream import LazyLayers, StreamedLayers
from .pipeline import Pipeline
from .report import Advice

LEAST_SHARED = 0.5  # tokens that a chunk counts as sharing with the question when it shares none


class PositionRun(NamedTuple):
    """The longest run at the end of a prompt's tokens so far in which each is one position behind the one before."""

    start: int  # the number of the first of them in the prompt
    last: np.ndarray  # the column of the last of them, then its positions, `[1 + axes]`


class TokenPositions(NamedTuple):
    """Where the new tokens of one prompt are."""

    starts: np.ndarray  # `[tokens]`: for each token the number of the first one of its run
    is_moved: bool  # token 0 is in another column than 0, or at another position


def is_readable(position_ids: Any, ids: Tensor) -> bool:
    """Whether there is a position for each of `[batch, tokens]`, or for those of all rows, on one axis or several."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() not in (2, 3) or not position_ids.numel():
        return False
    return position_ids.shape[-1] == ids.shape[1] and position_ids.shape[-2] in (1, ids.shape[0])


def copy_to_host(
    ids: Tensor, position_ids: Tensor | None, mask: Tensor | None, past: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Copy ids, positions and mask of a forward behind `past` tokens to the host, in one copy.

    Without `position_ids` each token is at the position of its column.

    Shapes: ids `[batch, tokens]`, position_ids as in `is_readable`, mask `[batch, past + tokens]` → ids, columns and
    positions `[batch, 1 + axes, tokens]`, mask.
    """
    rows, width = ids.shape
    parts = [ids]
    if position_ids is not None:
        axes = position_ids.reshape(-1, *position_ids.shape[-2:]).expand(-1, rows, -1)
        parts.append(axes.transpose(0, 1).flatten(1))
    if mask is not None:
        parts.append(mask)
    is_float = any(part.is_floating_point() for part in parts)
    dtype = torch.float64 if is_float else torch.int64
    joined = torch.cat([part.to(ids.device, dtype) for part in parts], dim=1)
    widths = [part.shape[1] for part in parts]
    copied = [part.numpy() for part in joined.cpu().split(widths, dim=1)]
    new_ids = copied.pop(0).astype(np.int64)
    columns = np.broadcast_to(np.arange(past, past + width), (rows, 1, width))
    positions = columns
    if position_ids is not None:
        positions = copied.pop(0).reshape(rows, -1, width)
    everywhere = np.concatenate((columns, positions), axis=1)
    return new_ids, everywhere, copied[0] if copied else None


def find_runs(
    columns_and_positions: np.ndarray, before: int, past: int, run: PositionRun | None = None
) -> tuple[TokenPositions, PositionRun]:
    """Find the runs of new tokens that are one column and one position apart; returns them, and the last run.

    `before` tokens of the prompt are in the last of the `past` cached columns. `run` is the last run of these; None:
    it begins with token 0 of the prompt.

    Shape: `[1 + axes, tokens]`.
    """
    axes, count = columns_and_positions.shape
    numbers = before + np.arange(count)
    start = 0
    last = np.array([past - 1, before - 1])
    if run is not None:
        start, last = run
    if len(last) != axes:
        last = np.concatenate((last[:1], last[1:2].repeat(axes - 1)))
    if not count:
        return TokenPositions(numbers, False), PositionRun(start, last)
    steps = np.diff(columns_and_positions, axis=1, prepend=last[:, None])
    is_break = (steps != 1).any(axis=0)
    starts = np.maximum.accumulate(np.where(is_break, numbers, start))
    is_moved = bool((columns_and_positions[:, 0] != before).any())
    return TokenPositions(starts, is_moved), PositionRun(int(starts[-1]), columns_and_positions[:, -1])


@dataclass(frozen=True, eq=False)
class PlacedChunk:
    """A stored chunk in one row of the batch, or the part of it that the prompt has."""

    row: int
    start: int  # column of its first token, among the new columns
    chunk: ChunkKV
    exact: bool  # its K and V are those of a full prefill of this prompt
    number: int  # of the chunk, among those of its row
    first: int = 0  # number in the chunk of its first token that is used
    count: int | None = None  # how many are used; None: all from `first` on

    tokens: int = field(init=False, compare=False)  # how many are used
    is_whole: bool = field(init=False, compare=False)
    columns: slice = field(init=False, compare=False)  # where they are among the new columns
    inside: slice = field(init=False, compare=False)  # where they are in the chunk

    def __post_init__(self) -> None:
        stored = self.chunk.tokens
        tokens = stored - self.first if self.count is None else self.count
        vars(self).update(
            tokens=tokens,
            is_whole=tokens == stored,
            columns=slice(self.start, self.start + tokens),
            inside=slice(self.first, self.first + tokens),
        )


@dataclass(frozen=True)
class PromptRow:
    """The new tokens of one batch entry, without padding, and the prompt that they are a part of."""

    ids: tuple[int, ...]  # of the prompt, its earlier tokens included where it is known; a draft behind it has none
    end: int  # one more than the number in the prompt of the last new token
    start: int  # column of the first new token, among the new columns
    before: int = 0  # how many of the prompt's tokens are in the cache already
    columns: tuple[int, ...] = ()  # of each new token, where padding is between them; else empty
    columns_and_positions: Any = None  # of each new token, an array `[1 + axes, tokens]`; see `find_runs`
    positions: TokenPositions | None = None  # None: each token is at the position of its number
    spans: Sequence[Span] | None = None  # where the chunks are; None: they are searched for in the store
    prefix: int | None = None  # how many of the tokens before the first chunk are one more entry; None: all
    is_searched: bool = False  # stored chunks are searched for besides `spans`
    is_first: bool = True  # no token is in front of the prompt
    moved: Mapping[int, ChunkKV] = field(default_factory=dict)  # of the cache, by the number of their first token


@dataclass
class Plan:
    """What is known about the new tokens of one forward, before it runs.

    Columns are counted from the first new one. `begin` makes the masks `exact` and `reusable`, `[batch, columns]`.
    """

    chunks: list[PlacedChunk]
    real: Tensor  # `[batch, columns]`: no padding
    counts: list[int]  # of each row, its new tokens without padding
    config: BlendConfig  # of this forward
    tokenizers: set[str] = field(default_factory=set)  # digests of those that made the stored chunks
    replaced: list[ChunkKey] = field(default_factory=list)  # computed after a fault while they were read
    pipeline: Pipeline | None = None
    advice: Advice | None = None
    kept_ratio: float = 1.0
    uneven_chunks: int = 0  # computed because their tokens are at other distances from each other than in the store
    drafted: Sequence[int] = ()  # of each row, new tokens behind the prompt that was expected: those of a draft
    questions: list[tuple[int, ...]] = field(default_factory=list)  # of each row, the ids behind its last chunk
    found: dict[str, Any] = field(default_factory=Counter)  # what was found and what it took: figures of the report
    _table: Tensor | None = None  # see `token_table`

    def begin(self, logits_rows: int = 1) -> "Plan":
        """Mark the new tokens with stored KV, without the last `logits_rows` ones; once all chunks are there."""
        self.end = self.real.shape[1] - min(logits_rows, self.real.shape[1])
        self.has_padding = min(self.counts, default=0) < self.real.shape[1]
        self._marks = np.zeros((3, *self.real.shape), dtype=bool)  # stay with the host: exact, reusable, no padding
        exact, reusable, self._marks[2] = self._marks[0], self._marks[1], self.real
        for placed in self.chunks:
            marks = exact if placed.exact else reusable
            marks[placed.row, placed.columns] = True
        exact[:, self.end :] = False
        reusable[:, self.end :] = False
        self.stored_counts = reusable.sum(axis=1).tolist()
        exact_counts = exact.sum(axis=1).tolist()
        self.fresh_counts = (np.array(self.counts) - exact_counts - self.stored_counts).tolist()
        self.exact, self.reusable = torch.from_numpy(exact.copy()), torch.from_numpy(reusable.copy())
        return self

    def move_to(self, device: torch.device) -> None:
        """Put the masks where the model computes."""
        self.real = self.real.to(device)
        self.exact = self.exact.to(device)
        self.reusable = self.reusable.to(device)

    def fresh(self, with_reusable: bool) -> np.ndarray:
        """`[batch, tokens]`: True on columns that are not padding and have no exact KV; known to the host."""
        exact, reusable, real = self._marks
        fresh: np.ndarray = real & ~exact
        if not with_reusable:
            fresh &= ~reusable
        return fresh

    def sampled(self, rows: int) -> np.ndarray:
        """`[batch, tokens]`: the `fresh` columns that a probe computes, behind the first reusable one `rows` at most.

        These are of the question, behind the last reusable column: half of them its last, the others at equal
        distances. Between chunks none is computed, and none of a draft.
        """
        active = self.fresh(with_reusable=False)
        for row, line in enumerate(active):
            reusable = np.flatnonzero(self._marks[1, row])
            if not len(reusable):
                continue
            first, last = reusable[0], reusable[-1]
            line[first:last] = False
            if self.drafted and self.drafted[row]:
                columns = np.flatnonzero(self._marks[2, row])
                line[columns[-self.drafted[row] :]] = False
            question = np.flatnonzero(line[last:]) + last
            if len(question) > rows:
                tail = max(1, rows // 2)
                spread = np.linspace(0, len(question) - tail - 1, rows - tail).round().astype(int)
                kept = np.concatenate((question[spread], question[len(question) - tail :]))
                line[last:] = False
                line[kept] = True
        return active

    def token_table(self) -> Tensor:
        """`[3, batch, tokens]`: number of the chunk, index in it, its length; -1: cannot be selected."""
        if self._table is not None:
            return self._table
        table = np.full((3, *self.real.shape), -1, dtype=np.int64)
        for placed in self.chunks:
            if not placed.exact:
                number, offset, tokens = table[:, placed.row, placed.columns]
                number[:] = placed.number
                offset[:] = np.arange(placed.inside.start, placed.inside.stop)
                tokens[:] = placed.chunk.tokens
        self._table = torch.from_numpy(table).to(self.reusable.device)
        self._table[0].masked_fill_(~self.reusable, -1)
        return self._table

    def token_weights(self, importance: bool = True, words: bool = True) -> Tensor:
        """How much each token matters, as far as it is known: `[batch, tokens]` float32, 1 where nothing is known.

        Args:
            importance: multiply by the stored importance of the token, 1 on average over a prompt's chunks that have
                it. Numbers are compared if they are of one question: that of most of the chunks.
            words: multiply by the tokens that the question shares with the chunk, 1 on average over a prompt's chunks.
        """
        weights = np.ones(tuple(self.real.shape), np.float32)
        for row, asked in enumerate(self.questions):
            chunks = [placed for placed in self.chunks if placed.row == row and not placed.exact]
            known = [placed for placed in chunks if importance and placed.chunk.importance is not None]
            if known:
                ((question, _),) = Counter(placed.chunk.question for placed in known).most_common(1)
                numbers = {}
                for placed in known:
                    if placed.chunk.question == question:
                        of_chunk: Any = placed.chunk.importance
                        numbers[placed] = of_chunk.numpy()[placed.inside].astype(np.float32)
                mean = np.concatenate(list(numbers.values())).mean()
                for placed, of_tokens in numbers.items():
                    if mean > 0:
                        weights[row, placed.columns] *= of_tokens / mean
            if words:
                shared = shared_rarity([placed.chunk.key for placed in chunks], asked)
                for placed in chunks:
                    weights[row, placed.columns] *= shared[placed.chunk.key]
        return torch.from_numpy(weights).to(self.reusable.device)

    def drop(self, placed: PlacedChunk) -> None:
        """Treat a chunk as if it had not been stored: its tokens are computed like a question's."""
        self.chunks.remove(placed)
        self._table = None
        self._marks[:2, placed.row, placed.columns] = False
        self.reusable[placed.row, placed.columns] = False
        self.exact[placed.row, placed.columns] = False
        tokens = max(0, min(placed.columns.stop, self.end) - placed.start)
        self.fresh_counts[placed.row] += tokens
        if not placed.exact:
            self.stored_counts[placed.row] -= tokens


def shared_rarity(keys: Sequence[ChunkKey], question: Sequence[int]) -> dict[ChunkKey, float]:
    """For each chunk the sum over rare ids shared with the question of 1 / (chunks that have the id), 1 on average.

    An id is rare that at most half of the chunks have: the others say nothing of which chunk is asked for.
    """
    asked = set(question)
    shared = {key: asked.intersection(key.token_ids) for key in dict.fromkeys(keys)}
    chunks_with = Counter(token for found in shared.values() for token in found)
    sums = {}
    for key, found in shared.items():
        rare = sorted(token for token in found if 2 * chunks_with[token] <= len(shared))
        sums[key] = LEAST_SHARED + sum(1 / chunks_with[token] for token in rare)
    mean = sum(sums.values()) / max(1, len(sums))
    return {key: total / mean for key, total in sums.items()}


class Planner:
    """Finds chunks in prompts, fetches them from a store, and computes those that are missing.

    Args:
        model: which runs.
        store: where chunks are kept.
        fingerprint: of the model as it is now; after `plan` it may be another.
        chunk_prefix_ids: the ids before each chunk while it is computed.
        config: the settings of the blend.
        tokenizer: digest of the one that made the prompt's ids; stored with what is computed.
        placeholders: ids that stand for something else than text; a chunk that holds one is neither looked up nor
            computed alone.
        question_ids: of the question without content that is run behind each missing chunk; empty for none.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ChunkStore,
        fingerprint: str,
        chunk_prefix_ids: tuple[int, ...],
        config: BlendConfig | None = None,
        tokenizer: str = "",
        placeholders: Set[int] = frozenset(),
        question_ids: tuple[int, ...] = (),
    ) -> None:
        self._config = config or BlendConfig()
        self._text_config = text_config(model)
        self._model = model
        self._store = store
        self.fingerprint = fingerprint
        self._prefix_ids = chunk_prefix_ids
        self._tokenizer = tokenizer
        self._placeholders = placeholders
        self._question_ids = question_ids
        self._fetched: dict[ChunkKey, ChunkKV] = {}
        longest = getattr(self._text_config, "max_position_embeddings", None)
        self._most_tokens = math.inf if longest is None else longest  # of a chunk and its prefix, or it is computed
        self._frequencies: set[tuple[int, ...]] = set()  # those of the forward that is planned

    def plan(self, rows: Sequence[PromptRow], width: int, logits_rows: int = 1, length: int | None = None) -> Plan:
        """Decide which of `width` new columns are reused; `length` is one more than the largest position, if known."""
        self._key_of = partial(_known_key, self.fingerprint, self._store.namespace)

        # Which columns are tokens
        counts = [row.end - row.before for row in rows]
        real = np.zeros((len(rows), width), dtype=bool)
        for line, row, count in zip(real, rows, counts, strict=True):
            line[list(row.columns) or slice(row.start, row.start + count)] = True
        plan = Plan([], torch.from_numpy(real), counts, self._config)
        plan.drafted = [max(0, row.end - len(row.ids)) for row in rows]
        # The sets of rotary frequencies with which it may be computed: by the last token, or by the last column
        last_token = max(row.end for row in rows)
        last_column = max(row.before for row in rows) + width
        ends = {last_token, last_column} if length is None else {length}
        self._frequencies = {frequency_regime(self._text_config, end) for end in ends}

        # Find the chunks, and leave out those that the controller would rather have computed
        spans = [self._spans(row) for row in rows]
        if self._config.chains and not self._store.loads_in_part:
            spans = [self._chained(plan, *pair) for pair in zip(rows, spans, strict=True)]
        for row, of_row in zip(rows, spans, strict=True):
            stops = [span.start + span.tokens for span in of_row]
            stops += [start + chunk.tokens for start, chunk in row.moved.items()]
            plan.questions.append(row.ids[max(stops, default=len(row.ids)) :])
        keys = [span.key for of_row in spans for span in of_row]
        unloaded = set[ChunkKey]()
        if self._store.controller is not None:
            unloaded = self._advised(plan, keys)
        placed = list[tuple[ChunkKey, ChunkKV | None, dict[str, Any]]]()
        for number, (row, of_row) in enumerate(zip(rows, spans, strict=True)):
            loaded = [span for span in of_row if span.key not in unloaded]
            loaded += [ChunkSpan(start, chunk.key, 0, chunk.tokens) for start, chunk in row.moved.items()]
            loaded.sort(key=lambda span: span.start)
            for key, fields in self._place_chunks(plan, number, row, loaded):
                placed.append((key, row.moved.get(loaded[fields["number"]].start), fields))

        # Fetch them, and compute what is missing
        needed = list(dict.fromkeys(key for key, moved, _ in placed if moved is None and key not in self._fetched))
        missing = self._fetch(plan, needed)
        if missing:
            now = fingerprint(self._model)
            if now != self.fingerprint:  # its values have changed, which no version shows
                self.fingerprint = now
                self._fetched.clear()
                rows = [replace(row, moved={}) for row in rows]
                return self.plan(rows, width, logits_rows, length)
            self._compute_missing(plan, missing)
        for key, moved, fields in placed:
            plan.chunks.append(PlacedChunk(chunk=moved or self._fetched[key], **fields))
        plan.begin(logits_rows)
        plan.found["prompt_tokens"] += sum(counts)
        plan.found["reusable_tokens"] += sum(plan.stored_counts)
        plan.found["exact_tokens"] += sum(counts) - sum(plan.stored_counts) - sum(plan.fresh_counts)
        streamed = [chunk.layers for chunk in self._fetched.values() if isinstance(chunk.layers, StreamedLayers)]
        if streamed:
            plan.pipeline = Pipeline(streamed)
        self._fetched.clear()
        return plan

    def _advised(self, plan: Plan, keys: Sequence[ChunkKey]) -> set[ChunkKey]:
        """The chunks that the controller would rather have computed; more is recomputed where loading hides it."""
        chunks = [key for key in dict.fromkeys(keys) if key.chunk_prefix_ids == self._prefix_ids]  # no prefix
        least_ratio = plan.config.recompute_ratio
        if chunks:
            plan.advice = self._store.controller.decide(chunks, least_ratio)
        if plan.advice is None:
            return set()
        if plan.advice.ratio > least_ratio:
            plan.config = replace(plan.config, recompute_ratio=plan.advice.ratio)
        return {*chunks} - {chunks[number] for number in plan.advice.loaded}

    def _spans(self, row: PromptRow) -> list[ChunkSpan]:
        """The chunks of one prompt, from left to right."""
        # Those that were named, and those that are found beside them
        named = list(row.spans or ())
        spans = []
        for span in named:
            key = self._key_of(self._prefix_ids, span.token_ids)
            spans.append(ChunkSpan(span.start, key, span.first, span.tokens))
        if row.spans is None or row.is_searched:
            for hit in self._store.find(self.fingerprint, self._prefix_ids, row.ids):
                here = Span(hit.start, (), 0, hit.tokens)
                if not any(here.overlaps(span) for span in named):
                    spans.append(hit)
            spans.sort(key=lambda span: span.start)

        # A chunk at the very beginning is keyed, and computed, without a chunk prefix: it is exact
        if row.is_first and named and named[0].start == named[0].first == 0:
            spans[0] = spans[0]._replace(key=self._key_of((), named[0].token_ids))

        # The tokens before the first chunk are one more entry, or as many of them as a stored entry has
        first = row.ids[: spans[0].start] if spans and row.is_first else ()
        prefix = first[: row.prefix or 0]
        if row.spans is not None and row.prefix is None:
            prefix = first
        if not prefix and first == self._prefix_ids:
            prefix = first
        if prefix:
            spans.insert(0, ChunkSpan(0, self._key_of((), prefix), 0, len(prefix)))
        elif first:
            stored = self._store.find(self.fingerprint, (), first)[:1]
            spans[:0] = [hit for hit in stored if hit.start == hit.first == 0]

        # What is moved within the cache has seen more of the prompt than what is stored of the same tokens
        moved = [(start, start + chunk.tokens) for start, chunk in row.moved.items()]
        usable = []
        for found in spans:
            stop = found.start + found.tokens
            is_moved = any(first < stop and found.start < last for first, last in moved)
            # It is text that fits the model's positions behind its prefix
            ids = found.key.token_ids
            fits = len(found.key.chunk_prefix_ids) + len(ids) <= self._most_tokens
            if fits and not is_moved and self._placeholders.isdisjoint(ids):
                usable.append(found)
        return usable

    def _chained(self, plan: Plan, row: PromptRow, spans: list[ChunkSpan]) -> list[ChunkSpan]:
        """Put the longest stored chain, which is fetched, in the place of the first chunks."""
        chain: list[ChunkSpan] = []
        stop = 0
        for span in spans if row.is_first else ():
            start, stop = stop, span.start + span.tokens
            if min(row.moved, default=stop) < stop:
                break  # what is moved is between two chunks
            if not start and span.start == span.first == 0 and not span.key.chunk_prefix_ids:
                chain.append(span)
                continue
            fingerprint = self.fingerprint + CHAIN
            key = _known_key(fingerprint, self._store.namespace, row.ids[:start], row.ids[start:stop])
            is_text = self._placeholders.isdisjoint(key.token_ids)
            if not is_text or not self._store.contains(key) or self._fetch(plan, [key]):
                break
            chain.append(ChunkSpan(start, key, 0, stop - start))
        return [*chain, *spans[len(chain) :]]

    def _place_chunks(
        self, plan: Plan, number: int, row: PromptRow, spans: list[ChunkSpan]
    ) -> list[tuple[ChunkKey, dict[str, Any]]]:
        """The chunks of one row that are needed: the key of each, and the fields of its `PlacedChunk`."""
        placed = []
        exact_until = 0 if row.is_first else -1  # up to here all tokens are exact
        for index, span in enumerate(spans):
            stop = span.start + span.tokens
            if stop >= max(len(row.ids), row.end):
                continue  # the last token is always computed: its output is expected

            # What of it this forward brings, without the forward's last token
            first = max(span.start, row.before)
            count = min(stop, row.end - 1) - first

            # Was it computed behind the tokens before it in the prompt, by the same frequencies?
            key = span.key
            is_whole = not span.first and span.start not in row.moved
            is_exact = is_whole and span.start == exact_until and row.ids[: span.start] == key.chunk_prefix_ids
            if is_exact:
                stored = len(key.chunk_prefix_ids) + len(key.token_ids)
                is_exact = self._frequencies == {frequency_regime(self._text_config, stored)}

            # Are its tokens as far from each other as in the store, and from the prompt's first token?
            if count > 0 and row.positions is not None:
                run_start = int(row.positions.starts[first + count - 1 - row.before])
                if run_start > span.start:
                    plan.uneven_chunks += 1
                    continue
                if run_start > 0 or (row.positions.is_moved and scales_by_position(self._text_config)):
                    is_exact = False
            if is_exact:
                exact_until = stop
            if count <= 0:
                continue

            # At which columns, unless padding is between its tokens
            column = row.start + first - row.before
            if row.columns:
                columns = row.columns[first - row.before :][:count]
                if columns[-1] - columns[0] >= count:
                    continue
                column = columns[0]

            inside = span.first + first - span.start
            fields = {"row": number, "start": column, "exact": is_exact, "number": index}
            placed.append((key, {**fields, "first": inside, "count": count}))
            if span.start in row.moved:
                plan.found["moved_tokens"] += count
            if first == span.start and key.chunk_prefix_ids == self._prefix_ids:
                plan.found["seam_tokens"] += len(key.token_ids) - span.tokens
        return placed

    def _fetch(self, plan: Plan, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Fetch the chunks that are stored and of this model; returns the keys of the others."""
        if not keys:
            return []
        began_s = time.perf_counter()
        layout = layout_of(self._model)
        canaries = {"", canary_of(self._model)}  # those that are known to be the model's
        plan.found["check_ms"] += 1e3 * (time.perf_counter() - began_s)
        at_hand = self._store.at_hand(keys, layout)
        missing = []
        for key in keys:
            chunk = at_hand.get(key)
            if chunk is None:
                chunk = self._store.stream(key, layout)
                if chunk is not None and isinstance(chunk.layers, LazyLayers):
                    chunk.layers.recompute = partial(_recompute, plan.replaced, self._store, self._compute, key)
            if chunk is not None and chunk.canary not in canaries and not is_of_model(self._model, chunk.canary):
                self._store.reject(key, "canary")
                chunk = None
            if chunk is None:
                missing.append(key)
                continue
            plan.found["loaded_chunks"] += 1
            plan.tokenizers |= {chunk.tokenizer} - {""}
            canaries.add(chunk.canary)
            self._fetched[key] = chunk
        return missing

    def _compute_missing(self, plan: Plan, missing: Sequence[ChunkKey]) -> None:
        """Compute chunks, and store them."""
        chunks = self._compute(missing)
        for key in missing:
            began_s = time.perf_counter()
            chunk = next(chunks)
            computed_s = time.perf_counter()
            self._fetched[key] = self._store.put(chunk)
            plan.found["compute_ms"] += 1e3 * (computed_s - began_s)
            plan.found["store_ms"] += 1e3 * (time.perf_counter() - computed_s)
        plan.found["computed_chunks"] += len(missing)
        tokens = {key: len(key.token_ids) for key in self._fetched}
        plan.kept_ratio = sum(tokens[key] for key in tokens if self._store.contains(key)) / sum(tokens.values())

    def _compute(self, keys: Sequence[ChunkKey]) -> Iterator[ChunkKV]:
        """Compute chunks alone, and links behind all tokens before them."""
        of_model = [replace(key, fingerprint=self.fingerprint) for key in keys]
        chunks = compute_chunks(self._model, of_model, self._tokenizer, self._question_ids)
        for key, chunk in zip(keys, chunks, strict=True):
            yield replace(chunk, key=key)


@lru_cache(maxsize=1024)
def _known_key(fingerprint: str, namespace: str, chunk_prefix_ids: tuple[int, ...], ids: tuple[int, ...]) -> ChunkKey:
    """The key of a chunk, whose digest is made once for the requests that use it."""
    return ChunkKey(fingerprint, chunk_prefix_ids, ids, namespace)


def _recompute(
    replaced: list[ChunkKey], store: ChunkStore, compute: Callable[..., Iterator[ChunkKV]], key: ChunkKey
) -> ChunkKV:
    """Compute a chunk alone, and store it. Takes no plan: the chunk refers to this, and would keep itself alive."""
    replaced.append(key)
    return store.put(next(compute([key])))
