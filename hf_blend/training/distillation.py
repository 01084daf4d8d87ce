# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Train a fitted correction on what it is for: that the model answers as it does after a full prefill.

A regression brings K and V nearer to those of a prompt, all of them, though answers depend on few. Here the maps move
down the gradient of the answers' divergence, through the model, which stays as it is: the teacher is the model behind
a full prefill, the student the same model behind corrected chunks. Each prompt is a step, with all of its questions.

Source: ours; KVLink (arXiv 2502.16002) and KV Packet (2604.13226) train tokens around chunks on the same divergence.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import full_cache, input_device
from ..model.calibrate import rotary_styles
from ..model.capture import capture, capture_alone, keeps_tokens_alone
from ..model.correction import KV, ContextCorrection, addition, beside, features_of, not_sinks
from ..model.fingerprint import fingerprint
from ..model.identity.canonical import canonical, notes_kept
from ..prompt.pieces import Span
from ..rotary.base import RotaryStyle, compose
from ..store.chunk import ChunkKey, ChunkKV
from ..threads import cached_property

ANSWER_TOKENS = 12  # of full prefill's own answer
QUESTION_TOKENS = 8  # before the answer
QUESTION_WEIGHT = 0.3  # of these, beside an answer's
MOST = 3.0  # nats that a token counts
RATE, MOST_GRADIENT = 3e-4, 0.3
WRITTEN = 0.2  # of the size of K and V, in which what is added is measured
WEIGHTS = 1.0, 0.5, 0.25, 0.0  # of a regression, to begin with
TRIED = 4  # prompts, for which
HELD_OUT = 8  # prompts that tell what came of it
Case = tuple[tuple[int, ...], Sequence[Span], list[tuple[int, ...]]]  # ids up to the last chunk, chunks, what follows


@dataclass(frozen=True)
class Distilled:
    """What training brought.

    Attributes:
        correction: the trained one.
        alone: divergence of answers behind chunks that are not corrected, in nats a token, on prompts held out.
        fitted: with the correction that was given.
        trained: with the trained one.
    """

    correction: ContextCorrection
    alone: float
    fitted: float
    trained: float


def distilled(
    model: nn.Module,
    correction: ContextCorrection,
    prompts: Iterable[tuple[Sequence[int], Sequence[Span]]],
    progress: Callable[[Sequence[Case]], Iterable[Case]] = iter,
) -> Distilled:
    """Train a correction, in one pass over prompts.

    Args:
        model: the model that it was fitted for.
        correction: where to begin.
        prompts: ids and chunks of each, as in `ContextCorrection.fit`, with a question behind the last chunk; those
            that differ in it alone come one after another. The last few are held out.
        progress: shows how far the steps are, such as `tqdm`.

    Returns:
        The correction, and what it brought.

    Raises:
        ConfigError: there are too few prompts, one has no question, or the correction is of another model.
        UnsupportedModelError: the model keeps more of a chunk than K and V of its tokens.
    """
    listed = list(_cases(prompts))
    if len(listed) <= HELD_OUT:
        raise ConfigError(f"got {len(listed)} prompts to train a correction, expected more than {HELD_OUT}.")
    if not keeps_tokens_alone(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps a state beside K and V, expected K and V of each token alone. Use the "
            "correction as it was fitted."
        )
    correction.identity(fingerprint(model))
    with canonical(model), notes_kept(model):
        training = _Training(model, _weighted(model, correction, listed[:TRIED]))
        for number, case in enumerate(progress(listed[:-HELD_OUT])):
            training.step(case, number / (len(listed) - HELD_OUT))
        found = training.correction()
        held = [_Documents(model, correction, case) for case in listed[-HELD_OUT:]]
        means = (fmean(one.divergence(maps) for one in held) for maps in ({}, correction.maps, found.maps))
        return Distilled(found, *means)


def _weighted(model: nn.Module, correction: ContextCorrection, cases: Sequence[Case]) -> ContextCorrection:
    """Take as much of a correction as brings some answers nearest: on some models all of it takes them away."""
    tried = [_Documents(model, correction, case) for case in cases]
    weighted = [{layer: (down, up * weight) for layer, (down, up) in correction.maps.items()} for weight in WEIGHTS]
    return replace(correction, maps=min(weighted, key=lambda maps: fmean(one.divergence(maps) for one in tried)))


def _cases(prompts: Iterable[tuple[Sequence[int], Sequence[Span]]]) -> Iterator[Case]:
    """Put questions about the same chunks together."""

    def beginning(prompt: tuple[Sequence[int], Sequence[Span]]) -> tuple[int, ...]:
        return tuple(prompt[0][: max(span.stop for span in prompt[1])])

    for ids, group in groupby((one for one in prompts if one[1]), beginning):
        alike = list(group)
        questions = [tuple(every[len(ids) :]) for every, _ in alike]
        if not all(questions):
            raise ConfigError("a prompt ends with its last chunk, expected a question behind it.")
        yield ids, alike[0][1], questions


class _Training:
    """Maps on their way, each in units of what it reads and writes."""

    def __init__(self, model: nn.Module, start: ContextCorrection) -> None:
        self._model, self._start = model, start
        self._units: dict[int, KV] = {}
        self._maps: dict[int, KV] = {}
        self._optimizer: Any = None

    def step(self, case: Case, done: float) -> None:
        """Take a step down the divergence of a prompt's answers; `done` is the share of steps before it."""
        documents = _Documents(self._model, self._start, case)
        if self._optimizer is None:
            self._begin(documents)
        self._optimizer.param_groups[0]["lr"] = RATE * min(1.0, 10 * done + 0.1) * (1 + math.cos(math.pi * done)) / 2
        with torch.enable_grad():
            parts = [part for pair in self._maps.values() for part in pair]
            gradients = torch.autograd.grad(documents.loss(self._folded()), parts)
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient
        nn.utils.clip_grad_norm_(parts, MOST_GRADIENT)
        self._optimizer.step()

    def _begin(self, documents: "_Documents") -> None:
        for layer, (down, up) in self._start.maps.items():
            size = documents.layers[layer].known.square().mean(0).sqrt().clamp_min(1e-3).cpu()
            reads = torch.cat((size, torch.ones(len(down) - len(size))))[:, None]
            norm = (down * reads).square().mean().sqrt().clamp_min(1e-6) * math.sqrt(len(size))
            self._units[layer] = norm / reads, WRITTEN * size / norm
            self._maps[layer] = tuple(part / unit for part, unit in zip((down, up), self._units[layer], strict=True))
            for part in self._maps[layer]:
                part.requires_grad_()
        self._optimizer = torch.optim.Adam([one for pair in self._maps.values() for one in pair], betas=(0.9, 0.98))

    def _folded(self) -> dict[int, KV]:
        """The maps as a correction has them."""
        return {
            layer: (pair[0] * self._units[layer][0], pair[1] * self._units[layer][1])
            for layer, pair in self._maps.items()
        }

    def correction(self) -> ContextCorrection:
        """The maps as they are now, as they are saved."""
        folded = {layer: (down.half().float(), up.half().float()) for layer, (down, up) in self._folded().items()}
        return replace(self._start, maps=folded)


class _Turn(torch.autograd.Function):
    """Keys as at position 0 to where they are in the prompt; gradients the other way."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, style: type[RotaryStyle], turn: KV) -> Tensor:
        """Turn `[heads, tokens, head_dim]`."""
        ctx.style, ctx.turn, out = style, turn, torch.empty_like(keys)
        style.move(keys, turn, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Turn back: the transpose of a turn by an angle is one by its negative, whatever both are scaled by."""
        out = torch.empty_like(gradient)
        ctx.style.move(gradient.contiguous(), (ctx.turn[0], -ctx.turn[1]), out)
        return out, None, None


@dataclass(frozen=True)
class _Layer:
    """The chunks of a prompt in one layer: features side by side, and where their K and V belong."""

    known: Tensor
    inputs: Tensor
    keep: Tensor
    style: type[RotaryStyle]
    turn: KV | None
    around: KV

    def states(self, maps: KV | None, columns: Tensor) -> list[Tensor]:
        """K and V of the prompt up to its last chunk, `[1, kv_heads, tokens, head_dim]`, the chunks corrected."""
        found = self.known if maps is None else self.known + addition(self.inputs, self.keep, maps)
        parts = found.split([one.shape[1] * one.shape[3] for one in self.around], 1)
        states = [
            part.unflatten(1, (one.shape[1], -1)).transpose(0, 1).contiguous()
            for part, one in zip(parts, self.around, strict=True)
        ]
        if self.turn is not None:
            states[self.style.slot] = _Turn.apply(states[self.style.slot], self.style, self.turn)
        columns = columns.to(found.device)
        return [
            one.index_copy(2, columns, part[None].to(one.dtype)) for one, part in zip(self.around, states, strict=True)
        ]


class _Documents:
    """The chunks of one prompt, as they are stored and as they are in it, and what full prefill answers."""

    def __init__(self, model: nn.Module, correction: ContextCorrection, case: Case) -> None:
        ids, spans, questions = case
        self._model = model
        self._captured = capture(model, torch.tensor([ids]))
        self._columns = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        keys = [ChunkKey(correction.model, correction.prefix, span.token_ids) for span in spans]
        alone = capture_alone(model, keys)
        chunks = [(alone[key], span) for key, span in zip(keys, spans, strict=True)]
        styles = rotary_styles(model)
        self.layers = {layer: self._layer(chunks, layer, styles[layer]) for layer in correction.maps}
        self._answers = [self._answered(question) for question in questions]

    def _layer(self, chunks: Sequence[tuple[ChunkKV, Span]], layer: int, style: type[RotaryStyle]) -> _Layer:
        known, inputs, keep = [], [], []
        for chunk, span in chunks:
            own = slice(span.first, span.first + span.tokens)
            features = features_of(chunk, layer, style)
            known.append(features[own])
            inputs.append(beside(features)[own])
            keep.append(not_sinks(chunk, layer)[own])
        turn, table = None, self._captured.tables[layer]
        if table is not None and style.turns:
            cos, sin = (part.reshape(-1, part.shape[-1])[self._columns].float() for part in table)
            turn = compose(style, (torch.ones_like(cos), torch.zeros_like(sin)), (cos, sin))
        around = self._captured.layers[layer][:2]
        return _Layer(torch.cat(known), torch.cat(inputs), torch.cat(keep), style, turn, around)

    def _cache(self, states: Mapping[int, Sequence[Tensor]]) -> Any:
        """A stock cache that holds the prompt up to its last chunk: the true K and V where none are given."""
        cache = full_cache(self._model)
        for layer, true in enumerate(self._captured.layers):
            if len(true) >= 2:  # a layer may keep nothing
                cache.update(*states.get(layer, true[:2]), layer)
        return cache

    def _answered(self, question: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """Full prefill's answer, behind its question; the log probabilities of its tokens; the answer's length."""
        ids, cache = torch.tensor([question]), self._cache({})
        logits = self._forward(ids, cache)
        while True:
            token = logits[-1:].argmax(-1)
            answer = ids.shape[1] - len(question) + 1
            if answer == ANSWER_TOKENS or int(token) in self._ends:
                break
            ids = torch.cat((ids, token[None].cpu()), 1)
            logits = torch.cat((logits, self._forward(ids[:, -1:], cache)))
        return ids, logits[-answer - QUESTION_TOKENS :].log_softmax(-1), answer

    def _forward(self, ids: Tensor, cache: Any) -> Tensor:
        """Logits behind a cache, `[tokens, words]` float32."""
        found = self._model(input_ids=ids.to(input_device(self._model)), past_key_values=cache, use_cache=True)
        return found.logits[0].float()

    @cached_property
    def _ends(self) -> set[int]:
        ends = getattr(self._model.generation_config, "eos_token_id", None)
        return {*ends} if isinstance(ends, list) else {-1 if ends is None else int(ends)}

    def loss(self, maps: Mapping[int, KV]) -> Tensor:
        """What training makes smaller: answers count most, and no token much."""
        weighted = [
            one[-answer:].clamp(max=MOST).mean()
            + QUESTION_WEIGHT * one[:-answer].clamp(max=MOST).sum() / QUESTION_TOKENS
            for one, answer in self._divergences(maps)
        ]
        return torch.stack(weighted).mean()

    def divergence(self, maps: Mapping[int, KV]) -> float:
        """The divergence of the answers from full prefill's, in nats a token."""
        return fmean(float(one[-answer:].mean()) for one, answer in self._divergences(maps))

    def _divergences(self, maps: Mapping[int, KV]) -> Iterator[tuple[Tensor, int]]:
        """KL divergence behind corrected chunks of the last tokens of each question and of its answer."""
        states = {layer: one.states(maps.get(layer), self._columns) for layer, one in self.layers.items()}
        for ids, expected, answer in self._answers:
            found = self._forward(ids, self._cache(states))[-len(expected) :].log_softmax(-1)
            yield (expected.exp() * (expected - found)).sum(-1), answer
