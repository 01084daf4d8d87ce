# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model changes after its chunks were stored: they must not be used, and what it computes then not by the original.

Truth at every moment is what stock transformers computes with the model as it then is.
"""

import copy
import gc
import random
import shutil
from collections.abc import Sequence
from typing import Any

import torch

from hf_blend import BlendCache
from hf_blend.errors import HfBlendError
from hf_blend.store import ChunkKey, ChunkStore

from .changing import CHANGES, LASTING, PREPARED, SAME
from .fault import FaultClass, Verdict
from .oracle import Truth, is_near, stock_kv, stock_logits
from .world import SECRET, SINK

PREFIX, QUESTION = [1, 17, 23, 5], [90, 14, 33, 71, 8]
RANDOM = ("train mode", "autocast")  # whose logits are not those of a plain forward
NEAR = 2e-4
REQUESTS = 0.25  # of the changes: their whole requests take three times as long


class Changes(FaultClass):
    """Store, change, add and ask, some of it through a whole request; then ask with the original."""

    share = 0.008

    def setup(self) -> None:
        """Draw chunks, and the truth of the model that never changes."""
        self._original = self.world.model
        self._chunks = [self.world.chunks[place][:16] for place in (0, 2)]
        self._truths = [stock_kv(self._original, SINK, ids) for ids in self._chunks]

    def inject(self, count: int) -> None:
        """One change after the other."""
        for _ in range(count):
            kind = self.random.choice([*CHANGES, *SAME])
            in_request = self.random.random() < REQUESTS
            self.outcome.paths["request" if in_request else "add and get"] += 1
            torch.manual_seed(self.random.randrange(1 << 30))
            self.judge(kind, lambda: self._one(kind, in_request), may_refuse=kind in CHANGES)  # noqa: B023
            shutil.rmtree(self.folder, ignore_errors=True)
            gc.collect()

    def _one(self, kind: str, in_request: bool) -> Verdict:
        """The verdict is that of the changed model, unless the original, or the model once more itself, is harmed."""
        original, truths, draw = self._original, self._truths, random.Random(self.random.random())
        if kind in PREPARED:
            original = copy.deepcopy(original)
            PREPARED[kind](original, draw)
            truths = [stock_kv(original, SINK, ids) for ids in self._chunks]
        model = copy.deepcopy(original)
        settings: dict[str, Any] = {"secret": self.random.choice((None, SECRET)), "durability": "none"}
        with ChunkStore.open(self.folder, memory_bytes=self.random.choice((0, 1 << 26)), **settings) as store:
            before = store.add(model, None, self._chunks[:1], chunk_prefix_ids=SINK)
            if in_request:
                self._request(model, store, self._chunks[:1])
            refusal: HfBlendError | None = None
            try:
                with {**CHANGES, **SAME}[kind](model, draw):
                    verdict = self._changed(kind, model, store, before, in_request)
            except HfBlendError as error:
                verdict, refusal = Verdict.REFUSED, error
        with ChunkStore.open(self.folder, memory_bytes=0, **settings) as fresh:
            if not self._is_true(original, fresh, truths):
                return Verdict.WRONG
            if kind not in LASTING and not self._is_true(model, fresh):
                return Verdict.WRONG
        if refusal is not None:
            raise refusal
        return verdict

    def _changed(
        self, kind: str, model: Any, store: ChunkStore, before: Sequence[ChunkKey], in_request: bool
    ) -> Verdict:
        """The same request again, then the same chunks and one more."""
        if in_request and not self._request(model, store, self._chunks, compared=kind not in RANDOM):
            return Verdict.WRONG
        if not self._is_true(model, store):
            return Verdict.WRONG
        return (
            Verdict.RIGHT
            if store.add(model, None, self._chunks[:1], chunk_prefix_ids=SINK) == before
            else Verdict.MISS
        )

    def _is_true(self, model: Any, store: ChunkStore, truths: Sequence[Truth] | None = None) -> bool:
        """Whether what a store has for a model is what the model computes."""
        keys = store.add(model, None, self._chunks, chunk_prefix_ids=SINK)
        truths = truths or [stock_kv(model, SINK, ids) for ids in self._chunks]
        for key, truth in zip(keys, truths, strict=True):
            got = store.get(key)
            pairs = [] if got is None else zip(got.layers, truth.layers, strict=True)
            if not all(is_near(one, other) for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True)):
                return False
        return True

    def _request(
        self, model: Any, store: ChunkStore, chunks: Sequence[tuple[int, ...]], *, compared: bool = True
    ) -> bool:
        """Whether a request at ratio 1.0 gives the logits of a plain forward."""
        cache = BlendCache(model, store, recompute_ratio=1.0)
        inputs = cache.inputs(None, prefix=PREFIX, chunks=[*map(list, chunks)], question=QUESTION)
        cache.get_seq_length()
        with torch.no_grad():
            got = model(**inputs, past_key_values=cache, use_cache=True).logits[0, -1:]
        return not compared or is_near(got, stock_logits(model, inputs["input_ids"]), NEAR)
