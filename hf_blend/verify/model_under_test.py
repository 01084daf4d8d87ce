# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model as `hf-blend verify` checks it: with requests, and with its floor.

The floor is how far two full prefills of one model differ that are equal on paper. A blended prefill adds up the same
numbers in another order, so it can be no nearer to a plain one than plain ones are to each other. Every prompt is run
whole and alone, and again in each of these ways, none of our code in the model:

    other attention   eager in place of sdpa, or the other way round; alone and side by side
    other kernel      torch's plain attention kernel in place of its fused one; alone and side by side
    pieces            in 2, 3 and 7 pieces, each continuing the cache of those before
    batch             side by side with the other prompts, padded on the left

It is the largest difference over all ways, prompts and rows: more rows than any check looks at.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cache.blend_cache import BlendCache
from ..model.anatomy import cache_argument, decoder_layers, extras_of, full_cache, input_device, text_config
from ..model.calibrate import rotary_styles
from ..model.capture import capture, capture_chunk
from ..model.checks import FLOORS, BlendedPrefill, CheckedModel, CheckResult, Comparison, States, kv_of, question_rows
from ..model.identity import fingerprint
from ..prompt.pieces import Prompt, batch
from ..rotary.base import Table
from ..store import ChunkStore
from ..store.chunk import ChunkKV

FLOAT32_LOGITS = 1e-5  # expected of float32 even where the floor is lower
LENGTHS = (((17, 23, 31), 9), ((29, 12), 14), ((20, 20, 11, 8), 6))  # chunks and question of each request, in tokens
PREFIX_TOKENS = 4
PIECES = (2, 3, 7)


@dataclass(frozen=True)
class PrefillLogits:
    """What one forward gave for one prompt."""

    logits: Tensor
    layers: tuple[States, ...]


@dataclass(frozen=True)
class Floor:
    """Largest absolute differences between full prefills."""

    logits: float
    layer_0: float
    states: float


class ModelUnderTest(CheckedModel):
    """A model with fixed random requests, its rotary styles and its floor."""

    sequence_tokens, must_show = 46, True

    def __init__(self, model: nn.Module) -> None:
        """Look at the model; the requests and the floor come with their first use."""
        super().__init__(model)
        self.styles = rotary_styles(model)
        self.mixers = extras_of(model, len(decoder_layers(model)))
        self.num_layers = len(decoder_layers(model))
        bos = getattr(text_config(model), "bos_token_id", None)
        self.chunk_prefix_ids = (bos,) if isinstance(bos, int) else ()

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Three requests that differ in prefix, number and length of chunks, and question."""
        made = []
        for row, (lengths, question_tokens) in enumerate(LENGTHS):
            seed = 100 * row
            chunks = tuple(self.ids(count, seed + number) for number, count in enumerate(lengths))
            prefix = self.chunk_prefix_ids + self.ids(PREFIX_TOKENS + row, seed + 50)
            question = self.ids(question_tokens, seed + 60)
            made.append(Prompt.of_pieces(prefix, chunks, question))
        return made

    @property
    def groups(self) -> list[Sequence[Prompt]]:
        """Each request alone, and all side by side."""
        return [*super().groups, self.prompts]

    @cached_property
    def floor(self) -> Floor:
        """How far full prefills of these requests differ; measured once."""
        return measure_floor(self.model, self.prompts)

    @property
    def logit_tolerance(self) -> float:
        """How far logits may be off: the floor; in float32 1e-5 where the floor is lower."""
        return max(self.floor.logits, FLOAT32_LOGITS) if self.model.dtype == torch.float32 else self.floor.logits

    def cache(self, ratio: float, store: Any = None, selector: str = "kv-deviation", **more: Any) -> BlendCache:
        """A cache for a request, on its own store if none is given; a failed self-test is for the checks to say."""
        store = ChunkStore.open("memory://") if store is None else store  # an empty store is false
        return BlendCache(self.model, store, recompute_ratio=ratio, selector=selector, allow_unverified=True, **more)

    def inputs(self, cache: BlendCache, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Announce prompts to a cache, and give what the model is called with: ids, mask and positions."""
        return placed(self.model, super().inputs(cache, prompts))

    def forward(self, cache: BlendCache, inputs: dict[str, Tensor], rows: int) -> Tensor:
        """One forward with a cache; local layers keep what lies outside their windows, for checks that look at it."""
        cache.activate_past_recording()
        return super().forward(cache, inputs, rows)

    def plain(self, prompts: Sequence[Prompt]) -> list[PrefillLogits]:
        """Prefill the same prompts, side by side, with the plain model."""
        return prefill(self.model, prompts)

    def compare_with_plain(self, got: BlendedPrefill) -> CheckResult:
        """The largest absolute difference of logits, against the floor; where these are the same, of K and V."""
        runs = self.plain(got.prompts)
        expected = torch.stack([run.logits[-question_rows(got.prompts) :] for run in runs])
        error = distance(got.logits, expected)
        allowed = max(self.floor.states, self.logit_tolerance)
        for row, run in enumerate(runs):
            layers = _rows_of(got.layers, row, len(run.logits))
            apart = states_apart(layers, run.layers)
            if not apart <= allowed:
                return CheckResult(apart, allowed, f"the K and V of request {row} are off by {apart:.2g}")
        return CheckResult(error, self.logit_tolerance)

    def compare(self, compared: Sequence[Comparison], plain: str) -> CheckResult:
        """The largest absolute difference of logits or, where none are compared, of K and V of layer 0.

        A key is rounded three times where it is computed, there and here, and once more where it is moved.
        """
        judged = [comparison for comparison in compared if comparison.layer is None] or compared
        error = max(distance(comparison.got, comparison.expected) for comparison in judged)
        if judged[0].layer is None:
            return CheckResult(error, FLOORS * self.logit_tolerance)  # plain ones differ so, too, at other positions
        largest = max(float(comparison.expected.abs().amax()) for comparison in judged)
        return CheckResult(error, self.floor.layer_0 + largest * rounding(self.model.dtype, 6, moves=1))

    def contribution_tolerance(self, dtype: torch.dtype) -> float:
        """Queries and keys are rounded as where they are moved once each."""
        return rounding(dtype, 12, moves=2)

    def chunk(self, ids: Sequence[int]) -> ChunkKV:
        """A chunk computed alone, as a request does it."""
        return capture_chunk(self.model, ids, self.chunk_prefix_ids, fingerprint(self.model))

    def tables_at(self, start: int, tokens: int) -> tuple[Table | None, ...]:
        """The rotary tables that the model hands to its layers for some positions."""
        ids = torch.tensor([self.ids(tokens, seed=0)], device=input_device(self.model))
        positions = torch.arange(start, start + tokens, device=ids.device)[None]
        return capture(self.model, ids, positions).tables


def measure_floor(model: nn.Module, prompts: Sequence[Prompt]) -> Floor:
    """Run the prompts plainly in several ways and compare."""
    expected = prefill_alone(model, prompts)
    ways = [prefill(model, prompts)]
    for count in PIECES:
        ways.append(in_pieces(model, prompts, count))
    with sdpa_kernel(SDPBackend.MATH):
        ways.append(prefill_alone(model, prompts))
        ways.append(prefill(model, prompts))
    other = "eager" if attention_of(model) != "eager" else "sdpa"
    if other in attentions(model):
        with attending(model, other):
            ways.append(prefill_alone(model, prompts))
            ways.append(prefill(model, prompts))
    logits = layer_0 = states = 0.0
    for way in ways:
        for run, again in zip(expected, way, strict=True):
            logits = max(logits, distance(run.logits, again.logits))
            layer_0 = max(layer_0, states_apart(run.layers[:1], again.layers[:1]))
            states = max(states, states_apart(run.layers, again.layers))
    return Floor(logits, layer_0, states)


def prefill_alone(model: nn.Module, prompts: Sequence[Prompt]) -> list[PrefillLogits]:
    """Run each prompt through the plain model."""
    return [prefill(model, [prompt])[0] for prompt in prompts]


@torch.no_grad()
def continued(model: nn.Module, ids: Sequence[int], cache: Any) -> Tensor:
    """Logits of more tokens of one prompt behind those of a cache, `[tokens, vocabulary]`, float32."""
    tokens = torch.tensor([ids], device=input_device(model))
    logits: Tensor = model(tokens, **cache_argument(model, cache), use_cache=True).logits
    return logits[0].float()


@torch.no_grad()
def prefill(model: nn.Module, prompts: Sequence[Prompt]) -> list[PrefillLogits]:
    """Run prompts side by side through the plain model."""
    ids, mask = batch(prompts, 0)
    cache = full_cache(model)
    inputs = placed(model, {"input_ids": ids, "attention_mask": mask})
    logits = model(**inputs, **cache_argument(model, cache), use_cache=True).logits.float()
    return [_cut(logits, cache, row, len(prompt.ids)) for row, prompt in enumerate(prompts)]


@torch.no_grad()
def in_pieces(model: nn.Module, prompts: Sequence[Prompt], count: int) -> list[PrefillLogits]:
    """Run each prompt alone, in pieces that continue each other's cache."""
    runs = []
    for prompt in prompts:
        cache = full_cache(model)
        pieces = torch.tensor(prompt.ids).tensor_split(count)
        logits = [continued(model, piece.tolist(), cache) for piece in pieces]
        runs.append(_cut(torch.cat(logits)[None], cache, 0, len(prompt.ids)))
    return runs


def placed(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs on the model's device, with the positions that `generate` would give to a padded batch.

    Shapes: inputs `[batch, tokens]`.
    """
    inputs = {name: value.to(input_device(model)) for name, value in inputs.items()}
    return {**inputs, "position_ids": (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


def attention_of(model: nn.Module) -> str:
    """The attention implementation that the model uses."""
    return text_config(model)._attn_implementation or "eager"


def attentions(model: nn.Module) -> list[str]:
    """Those of eager and sdpa that the model can use."""
    return ["eager", "sdpa"] if getattr(model, "_supports_sdpa", True) else ["eager"]


@contextmanager
def attending(model: nn.Module, implementation: str) -> Iterator[None]:
    """Let the model use another attention implementation for a while."""
    before = attention_of(model)
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest absolute difference of two tensors of one shape; NaN counts as infinite."""
    if got.shape != expected.shape or not got.numel():
        return 0.0 if got.shape == expected.shape else float("inf")
    largest = float((got.float() - expected.float()).abs().amax())
    return largest if largest == largest else float("inf")


def states_apart(got: Sequence[States], expected: Sequence[States]) -> float:
    """Largest difference of what layers keep of some tokens, `[…, tokens, width]` each."""
    largest = 0.0
    for layer, expected_layer in zip(filter(None, got), filter(None, expected), strict=True):  # that keep any
        for states, others in zip(layer, expected_layer, strict=True):
            apart = distance(states, others)
            largest = max(largest, apart)
    return largest


def _cut(logits: Tensor, cache: Any, row: int, tokens: int) -> PrefillLogits:
    return PrefillLogits(logits[row, -tokens:], tuple(_rows_of(kv_of(cache), row, tokens)))


def _rows_of(layers: Sequence[States], row: int, tokens: int) -> list[States]:
    """What layers keep of the last tokens of one prompt, `[kv_heads, tokens, width]` each."""
    cut = []
    for layer in layers:
        cut.append(tuple(states[row, :, -tokens:] for states in layer))
    return cut


def rounding(dtype: torch.dtype, roundings: int, moves: int = 0) -> float:
    """Bound on what rounding does to keys, as a share of the largest one.

    A pair that turns can be larger than its members by the square root of 2, and one rounding to nearest costs half an
    eps. A move composes tables and turns in float32, about 16 roundings, and rounds once to the dtype.

    `roundings` says how often a key was rounded to the dtype by the model, besides the moves.
    """
    eps, fine = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    return 2**0.5 * ((roundings + moves) * eps + 16 * moves * fine) / 2


def unchosen(got: BlendedPrefill) -> Tensor:
    """`[batch, tokens]`: the columns of the chunks that were not chosen."""
    width = max(len(prompt.ids) for prompt in got.prompts)
    grid = torch.zeros((len(got.prompts), width), dtype=torch.bool)
    for row, prompt in enumerate(got.prompts):
        start = width - len(prompt.ids)
        grid[row, start + len(prompt.prefix) : width - len(prompt.question)] = True
    for row, columns in enumerate(got.cache.report.chosen_columns):  # none where no chunk was blended
        grid[row, columns] = False
    return grid
