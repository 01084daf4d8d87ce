# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What stands on the ladder: one model in one dtype with one attention, and the requests that it is given."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.blend_cache import BlendCache
from ..model.anatomy import decoder_layers, text_config
from ..model.calibrate import rotary_styles
from ..model.capture import capture, capture_chunk, capture_chunks
from ..model.fingerprint import fingerprint
from ..model.mixer_probe import mixers_of
from ..model.packs import packs
from ..model.quantised import silence_casts
from ..prompt.pieces import Prompt, batch
from ..rotary.tables import Table
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkKV
from .floor import Floor, PrefillLogits, States, device_of, kv_of, measure_floor, placed, prefill

FLOAT32_LOGITS = 1e-5  # asked of float32 even where the floor is lower
LENGTHS = (((17, 23, 31), 9), ((29, 12), 14), ((20, 20, 11, 8), 6))  # chunks and question of each request, in tokens
PREFIX_TOKENS = 4


@dataclass
class Blended:
    """A blended prefill."""

    cache: BlendCache
    asked: Tensor
    prompts: Sequence[Prompt]

    @property
    def layers(self) -> list[States]:
        """(K, V) of each layer, `[batch, kv_heads, tokens, head_dim]`; () where it keeps none."""
        return kv_of(self.cache)


class ModelUnderTest:
    """A model with fixed random requests, its rotary styles and its floor."""

    def __init__(self, model: nn.Module) -> None:
        """Make the requests."""
        silence_casts(model, self)
        self.model = model
        self.styles = rotary_styles(model)
        self.mixers = mixers_of(model)
        self.num_layers = len(decoder_layers(model))
        self.vocabulary = text_config(model).vocab_size
        bos = getattr(text_config(model), "bos_token_id", None)
        self.chunk_prefix_ids = (bos,) if isinstance(bos, int) else ()
        self.prompts = self._prompts()

    @cached_property
    def floor(self) -> Floor:
        """How far full prefills of these requests differ; measured once."""
        return measure_floor(self.model, self.prompts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that K and V have."""
        return self.model.dtype

    @property
    def logit_tolerance(self) -> float:
        """How far logits may be off: the floor; in float32 1e-5 where the floor is lower."""
        return max(self.floor.logits, FLOAT32_LOGITS) if self.dtype == torch.float32 else self.floor.logits

    def ids(self, count: int, seed: int) -> tuple[int, ...]:
        """Random tokens, none of the special ones at the beginning of the vocabulary."""
        drawn = random.Random(seed)
        return tuple(drawn.randrange(min(8, self.vocabulary - 1), self.vocabulary) for _ in range(count))

    def cache(self, ratio: float, store: ChunkStore | None = None, **settings: Any) -> BlendCache:
        """A fresh request, on its own store if none is given; the ladder judges, so the self-test may not refuse."""
        store = ChunkStore.open("memory://") if store is None else store  # an empty store is false
        return BlendCache(self.model, store, recompute_ratio=ratio, allow_unverified=True, **settings)

    def inputs(self, cache: BlendCache, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        """Announce prompts to a cache, and give what the model is called with: ids, mask and positions."""
        pieces: dict[str, Any] = {"prefix": [p.prefix for p in prompts], "chunks": [p.chunks for p in prompts]}
        return placed(self.model, cache.inputs(None, **pieces, question=[p.question for p in prompts]))

    @torch.no_grad()
    def forward(self, cache: BlendCache, inputs: dict[str, Tensor], rows: int) -> Tensor:
        """One forward with a cache, entered as `generate` enters: logits of the last rows, float32.

        Local layers go on holding what lies outside their windows, for the rungs that look at it.
        """
        cache.activate_past_recording()
        return self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=rows).logits.float()

    def prefill(self, cache: BlendCache, prompts: Sequence[Prompt]) -> Tensor:
        """PrefillLogits prompts with a cache: logits of the question's rows, as `Blended.asked`."""
        return self.forward(cache, self.inputs(cache, prompts), question_rows(prompts))

    def blend(
        self, prompts: Sequence[Prompt], ratio: float, store: ChunkStore | None = None, **settings: Any
    ) -> Blended:
        """PrefillLogits prompts with stored chunks."""
        cache = self.cache(ratio, store, **settings)
        return Blended(cache, self.prefill(cache, prompts), prompts)

    def plain(self, prompts: Sequence[Prompt]) -> list[PrefillLogits]:
        """PrefillLogits the same prompts, side by side, with the plain model."""
        return prefill(self.model, prompts)

    def asked(self, prompts: Sequence[Prompt]) -> Tensor:
        """Plain logits of the question's rows, `[batch, rows, vocabulary]`, as `Blended.asked`."""
        return torch.stack([run.logits[-question_rows(prompts) :] for run in self.plain(prompts)])

    def chunk(self, ids: Sequence[int], chunk_prefix_ids: Sequence[int] | None = None) -> ChunkKV:
        """A chunk computed alone, as a request does it."""
        sink = self.chunk_prefix_ids if chunk_prefix_ids is None else chunk_prefix_ids
        return capture_chunk(self.model, ids, sink, fingerprint(self.model))

    def chunks(self, all_ids: Sequence[tuple[int, ...]]) -> list[ChunkKV]:
        """Different chunks as a request computes them that lacks them all, in the same order."""
        identity = fingerprint(self.model)
        keys = [ChunkKey(identity, self.chunk_prefix_ids, ids) for ids in all_ids]
        made = {one.key: one for pack in packs(self.model, keys) for one in capture_chunks(self.model, pack)}
        return [made[key] for key in keys]

    def tables_at(self, start: int, tokens: int) -> tuple[Table | None, ...]:
        """The rotary tables that the model hands to its layers for some positions."""
        ids = torch.tensor([self.ids(tokens, seed=0)], device=device_of(self.model))
        places = torch.arange(start, start + tokens, device=ids.device)[None]
        return capture(self.model, ids, places).tables

    def prompt_tables(self, prompts: Sequence[Prompt]) -> tuple[Table | None, ...]:
        """The rotary tables that the model hands to its layers for a batch of prompts."""
        built = batch(prompts, 0)
        given = placed(self.model, {"input_ids": built.input_ids, "attention_mask": built.attention_mask})
        return capture(self.model, given["input_ids"], given["position_ids"], given["attention_mask"]).tables

    def _prompts(self) -> list[Prompt]:
        made = []
        for row, (lengths, asked) in enumerate(LENGTHS):
            chunks = tuple(self.ids(count, seed=100 * row + place) for place, count in enumerate(lengths))
            prefix = (*self.chunk_prefix_ids, *self.ids(PREFIX_TOKENS + row, seed=100 * row + 50))
            made.append(Prompt(prefix, chunks, self.ids(asked, seed=100 * row + 60)))
        return made


def question_rows(prompts: Sequence[Prompt]) -> int:
    """Tokens of the shortest question."""
    return min(len(prompt.question) for prompt in prompts)
