# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of what is reused: prefix caching, fresh questions, stored bytes, the choice of tokens, causality."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import Cache

from ..model.anatomy import full_cache, stock_cache
from ..model.cache_keyword import cache_argument
from ..model.checks import Blended, CheckResult, States, check, kv_of, nothing_shown, refused, violations
from ..model.placement import input_device
from ..prefill.plan import PlacedChunk
from ..prefill.realign import Realigner
from ..prefill.report import BlendReport
from ..prompt.pieces import Prompt
from ..store import ChunkStore
from .model_under_test import ModelUnderTest, distance, in_pieces, reusable, states_apart, unchosen

RATIO = 0.3
RATIOS = (0.0, 0.05, 0.15, 0.5, 0.99, 1.0)
SCATTERED = 0.5  # of the tokens are recomputed, chosen at random, so that the choice does not look at what is changed
PIECE_TOKENS = (2, 3, 4, 8, 16, 32, 64, 128)  # in each, experts multiply other numbers of rows


@check()
def prefix_cache(subject: ModelUnderTest) -> CheckResult:
    """One chunk at the beginning at ratio 0 is prefix caching, bit for bit: logits, and K and V at any layer.

    With a prefix and without, against a stock cache that holds the chunk and is continued with the question. A stock
    cache keeps all keys or, made with a config, those in a layer's window; the same sum is rounded in two ways then.
    It is enough to be one of the two, in every layer alike. A mixer scans the prompt in one piece, where the stock
    cache is continued in two: with mixers as much is allowed as full prefills differ by.
    """
    allowed = max(subject.logit_tolerance, subject.floor.states) if any(subject.mixers) else 0.0
    return CheckResult(max(_prefix_error(subject, prefix) for prefix in {(), subject.chunk_prefix_ids}), allowed)


@check()
@torch.no_grad()
def question_is_fresh(subject: ModelUnderTest) -> CheckResult:
    """The question is always computed: at ratio 0 its rows equal those of the plain model over the stored chunks.

    The stock model continues a stock cache that holds the fused prefix and chunks, for each request alone.
    """
    if any(subject.mixers):
        return refused(
            f"{type(subject.model).__name__} has mixers, whose states behind the fused chunks no stock cache can be "
            "given; see fused_ratio."
        )
    errors = []
    for prompt in subject.prompts:
        got, stock = subject.blend([prompt], 0.0), full_cache(subject.model)
        before = len(prompt.ids) - len(prompt.question)
        for index, states in enumerate(got.layers):
            if states:  # others look at those of an earlier layer
                stock.update(*(tensor[:, :, :before].clone() for tensor in states), index)
            indexer_keys = getattr(got.cache.layers[index], "indexer_keys", None)
            if indexer_keys is not None:
                stock.update_indexer(indexer_keys[:, :before].clone(), index)
        errors.append(distance(got.logits, _continued(subject, prompt.question, stock)))
    return CheckResult(max(errors), subject.logit_tolerance)


@check()
def unchosen_bytes(subject: ModelUnderTest) -> CheckResult:
    """A token that was not chosen has the bytes of the realigned store at every layer behind the check layer.

    In a batch, against chunks that are computed and realigned again, by the same `Realigner`: a request leaves these
    bytes alone. That they are right is shown by `moved_chunk` and `layer_0`, from forwards of the model.
    """
    got = subject.blend(subject.prompts, RATIO)
    stale, chunks = unchosen(got), _placed_chunks(subject, got)
    if not stale.any():
        return nothing_shown("every token was chosen, so nothing was shown")
    realigner, wrong = Realigner(subject.styles, BlendReport()), []
    tables = subject.prompt_tables(subject.prompts)
    for index in range(got.cache.config.check_layers[0] + 1, subject.num_layers):
        if not got.layers[index]:
            continue
        realigner.tables[index] = tables[index]
        expected = tuple(torch.zeros_like(states) for states in got.layers[index])
        realigner.write(index, chunks, *expected)
        for name, mine, stored in zip("KV", got.layers[index], expected, strict=True):
            if not torch.equal(mine.transpose(1, 2)[stale], stored.transpose(1, 2)[stale]):
                wrong.append(f"{name} of layer {index}")
    return violations(wrong)


@check()
def selection(subject: ModelUnderTest) -> CheckResult:
    """The chosen tokens are sorted, unique, of the chunks only, exactly ⌈ratio·n⌉, and nested as the ratio grows.

    For the default selector, in a batch of requests of different lengths.
    """
    store, wrong = ChunkStore.open("memory://"), []
    smaller: list[set[int]] = [set() for _ in subject.prompts]
    for ratio in RATIOS:
        got = subject.blend(subject.prompts, ratio, store)
        chosen = got.cache.report.chosen_columns or [[] for _ in subject.prompts]
        for row, columns in enumerate(chosen):
            allowed = set(reusable(got)[row].nonzero().flatten().tolist())
            wrong += _broken_promises(columns, allowed, ratio, smaller[row])
        smaller = [set(columns) for columns in chosen]
    return violations(wrong)


@check()
def causality(subject: ModelUnderTest) -> CheckResult:
    """A changed token moves no recomputed state before it, although the recomputed tokens are scattered.

    It is changed in the middle of a chunk, at its end, and in the question. A mixture of experts is another matter: a
    token that goes to another expert changes the shapes in which others are computed. Where the plain model moves
    states before the token as well, the floor is allowed.
    """
    prompt = subject.prompts[0]
    before, error, moved = _scattered(subject, prompt), 0.0, 0.0
    changes = _changes(subject, prompt)
    for changed, column in changes:
        after = _scattered(subject, changed)
        error = max(error, states_apart(before, after, slice(0, column)))
        moved = max(moved, states_apart(before, after, slice(column, None)))
    if not moved:
        return nothing_shown("the changed tokens changed nothing, so nothing was shown")
    return CheckResult(error, subject.floor.states if error and _moves_plainly(subject, prompt, changes) else 0.0)


@torch.no_grad()
def _prefix_error(subject: ModelUnderTest, prefix: tuple[int, ...]) -> float:
    prompt = Prompt(prefix, subject.prompts[0].chunks[:1], subject.prompts[0].question)
    got = subject.blend([prompt], 0.0, chunk_prefix_ids=prefix)
    stocks = [full_cache(subject.model), stock_cache(subject.model)]
    return min(_cache_error(got, _after_chunk(subject, prompt, stock), stock) for stock in stocks)


def _after_chunk(subject: ModelUnderTest, prompt: Prompt, stock: Cache) -> Tensor:
    """Fill a stock cache with prefix and chunk, and continue it: the question's logits.

    A product of one row may round unlike that of many, so the prefix's columns come from a forward of it alone, as
    they do in a store, where many chunks share it.
    """
    _continued(subject, prompt.prefix + prompt.chunks[0], stock)
    if prompt.prefix:
        alone, tokens = full_cache(subject.model), len(prompt.prefix + prompt.chunks[0])
        _continued(subject, prompt.prefix, alone)
        for layer, own in zip(filter(None, kv_of(stock)), filter(None, kv_of(alone)), strict=True):
            forgotten = tokens - layer[0].shape[2]  # outside of the window
            count = max(0, len(prompt.prefix) - forgotten)
            if count:
                for states, of_prefix in zip(layer, own, strict=True):
                    states[:, :, :count] = of_prefix[:, :, -count:]
    return _continued(subject, prompt.question, stock)


def _continued(subject: ModelUnderTest, ids: tuple[int, ...], cache: Cache) -> Tensor:
    tokens = torch.tensor([ids], device=input_device(subject.model))
    return subject.model(tokens, **cache_argument(subject.model, cache), use_cache=True).logits.float()


def _cache_error(got: Blended, logits: Tensor, stock: Cache) -> float:
    pairs = [(got.logits, logits)]
    for mine, stocked in zip(filter(None, got.layers), filter(None, kv_of(stock)), strict=True):
        pairs += [(keys[:, :, -other.shape[2] :], other) for keys, other in zip(mine, stocked, strict=True)]
    return max(distance(*pair) for pair in pairs)


def _placed_chunks(subject: ModelUnderTest, got: Blended) -> list[PlacedChunk]:
    """Every chunk of the request at its position, computed again, together with those that it was computed with."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    ids_of = dict.fromkeys(ids for prompt in got.prompts for _, ids, *_ in prompt.spans())
    chunks = dict(zip(ids_of, subject.chunks(list(ids_of)), strict=True))
    return [
        PlacedChunk(row, width - len(prompt.ids) + start, chunks[ids], False, number)
        for row, prompt in enumerate(got.prompts)
        for number, (start, ids, *_) in enumerate(prompt.spans())
    ]


def _broken_promises(columns: list[int], allowed: set[int], ratio: float, smaller: set[int]) -> list[str]:
    expected = math.ceil(round(ratio * len(allowed), 6))
    promises = {
        f"{len(columns)} chosen where {expected} are expected": len(columns) == expected,
        "not sorted": columns == sorted(columns),
        "not unique": len(set(columns)) == len(columns),
        "outside of the chunks": set(columns) <= allowed,
        "a token chosen at a smaller ratio is missing": smaller <= set(columns),
    }
    return [f"ratio {ratio}: {promise}" for promise, holds in promises.items() if not holds]


def _moves_plainly(subject: ModelUnderTest, prompt: Prompt, changes: Sequence[tuple[Prompt, int]]) -> bool:
    """Whether the plain model, whole or in pieces of some length, moves states before a changed token."""
    for pieces in sorted({max(1, len(prompt.ids) // tokens) for tokens in PIECE_TOKENS}):
        before = in_pieces(subject.model, [prompt], pieces)[0].layers
        for changed, column in changes:
            after = in_pieces(subject.model, [changed], pieces)[0].layers
            if states_apart(before, after, slice(0, column)):
                return True
    return False


def _scattered(subject: ModelUnderTest, prompt: Prompt) -> list[States]:
    layers = subject.blend([prompt], SCATTERED, selector="random").layers
    return [tuple(states[0] for states in layer) for layer in layers]


def _changes(subject: ModelUnderTest, prompt: Prompt) -> list[tuple[Prompt, int]]:
    """The prompt with one other token, and its column."""
    changes = []
    (start, *_), middle = prompt.spans()[1], len(prompt.chunks[1]) // 2
    for offset in (middle, len(prompt.chunks[1]) - 1):
        chunks = (prompt.chunks[0], _other(subject, prompt.chunks[1], offset), *prompt.chunks[2:])
        changes.append((replace(prompt, chunks=chunks), start + offset))
    offset = len(prompt.question) // 2
    question = _other(subject, prompt.question, offset)
    return [*changes, (replace(prompt, question=question), len(prompt.ids) - len(question) + offset)]


def _other(subject: ModelUnderTest, ids: Sequence[int], index: int) -> tuple[int, ...]:
    other = next(token for token in subject.ids(8, seed=1) if token != ids[index])
    return (*ids[:index], other, *ids[index + 1 :])
