# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How the blocks of one request are filled: with those of an earlier request, or by a blended prefill.

A blended prefill also gives the logits of the first token. Shared blocks give none: the engine learns from
`search_prefix_match` how far they reach, and computes the rest.
"""

import hashlib
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.utils import stream_context

from .. import plugins
from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..model.anatomy import decoder_layers, default_sink
from ..model.cache_keyword import cache_argument
from ..model.canary import compute_chunk
from ..model.modality import KINDS_OF_TOKENS
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from ..store.chunk import ChunkKey, ChunkSpan
from .paged import BlendedPagedCache, salted
from .turns import Turns

__all__ = ["Blender", "Prefilled", "Request", "Reuse"]

FETCH_S = 2.0  # how long to wait for a chunk on another machine before it is computed

Spans = Sequence[ChunkSpan]


@dataclass(frozen=True)
class Reuse:
    """The prompt of a request, and the store that has its chunks."""

    store: ChunkStore
    prompt: TextPrompt
    salt: tuple[int, ...] = ()
    is_blended: bool = True

    @property
    def images(self) -> Mapping[str, Any]:
        """Arguments of a forward for the images of the prompt; empty if it has none."""
        return getattr(self.prompt, "arguments", {})


@dataclass
class Prefilled:
    """What a request's prefill cost."""

    how: str = "waiting"  # then "blended", "shared" or "plain"
    tokens: int = 0  # of the prompt that were in blocks when the engine began with it
    prefix_tokens: int = 0
    computed_chunks: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    charged_budget: float | None = None
    reason: str = ""  # why nothing was blended
    begun: float | None = None  # by time.perf_counter


@dataclass(eq=False)
class Request:
    """A request that the engine has taken from its queue."""

    state: Any  # the engine's own
    reuse: Reuse
    outcome: Prefilled
    lookup: Future[bool] | None = None  # whether anything of its prompt is stored; None once the engine sees it
    since: float = field(default_factory=time.monotonic)
    identity: str = ""  # the model's fingerprint, looked at between two steps
    logits: Tensor | None = None  # `[1, vocabulary]` behind a blended prompt
    error: BaseException | None = None  # with which its prefill ended
    filled_tokens: int = 0  # of its prompt that are in its blocks, until the scheduler finds them there
    chunks_end: int = 0  # tokens of its prompt up to the end of the last chunk

    @property
    def tenant(self) -> str:
        """The namespace of its store."""
        return self.reuse.store.namespace


class Blender:
    """Fills the blocks of requests, in the turns of the worker.

    Attributes:
        paged: the cache of these blocks; set when the engine starts.
        stream: the stream on which the engine computes; set when the engine starts.
        spared_tokens: of the last chunk that an exact prefix may lack: so few are not blended.
        may_grow: whether another prompt may take blocks; set before each turn.
    """

    paged: BlendedPagedCache
    stream: Any = None
    spared_tokens = 0
    may_grow = True

    def __init__(self, model: nn.Module, config: BlendConfig) -> None:
        """Learn from the selector of `config` whether blends depend on the question."""
        self._model, self._config = model, config
        selector = plugins.load("selectors", config.selector)(config.selector_options, seed=config.seed)
        self._sees_question = bool(selector.needs_question or selector.needs_full_prefill)

    def settle(self) -> None:
        """Wait for the device at the end of a turn: its length is what the requests that decode wait for."""
        if self._model.device.type != "cpu" and self.stream is not None:
            self.stream.synchronize()

    def has_stored(self, reuse: Reuse, identity: str) -> bool:
        """Return whether the store has chunks of a prompt under the identity of a model."""
        return bool(self._spans(reuse, identity, reuse.prompt.ids))

    def fill(self, request: Request, turns: Turns) -> None:
        """Fill the blocks of one request, in turns. Called by the worker."""
        with torch.no_grad(), stream_context(self.stream), turns.at_layers(decoder_layers(self._model)):
            request.outcome.begun = time.perf_counter()
            request.outcome.tokens = self._fill_blocks(request, turns)
            turns.checkpoint()  # from here to the end the engine waits

    def _fill_blocks(self, request: Request, turns: Turns) -> int:
        """Fill the blocks of a request; return how many first tokens of its prompt are in them."""
        state, reuse, paged = request.state, request.reuse, self.paged
        self._compute_missing(request, turns)
        spans = self._spans(reuse, request.identity, state.initial_tokens)
        if not spans and not reuse.images:
            return 0
        exact, least = (spans[0].start, spans[-1].start + spans[-1].tokens) if spans else (0, 0)
        request.chunks_end = least
        ids = salted(state.initial_tokens, reuse.salt)
        root = self._root(spans, reuse, state.initial_tokens) if spans else 0
        chunks = []  # kept in memory until they are blended
        for span in spans:
            chunks.append(reuse.store.get(span.key, FETCH_S))
            turns.release()
        turns.checkpoint()
        may_share = paged.shares and not reuse.images  # ids do not tell which images are in blocks
        if may_share:
            if paged.count_exact(ids) >= max(exact + 1, least - self.spared_tokens):
                request.outcome.reason = "all chunks lie in an exact prefix that is in the engine's cache"
                return 0
            if shared := paged.share_blended(state, ids[:-1], exact, root, least):
                request.outcome.how = "shared"
                return shared
        while not (self.may_grow and paged.reserve(state, len(ids))):
            turns.checkpoint(end_turn=True)  # until other requests free their blocks
        self._blend(request, turns)
        del chunks
        is_as_planned = self._spans(reuse, request.identity, state.initial_tokens) == spans
        paged.register(state.request_id, ids if is_as_planned and may_share else (), exact, root, least)
        return len(ids)

    def _compute_missing(self, request: Request, turns: Turns) -> None:
        """Compute and store the documents of a request that are not stored."""
        store = request.reuse.store
        for key in self._missing(request.reuse, request.identity):
            with store.timed(key):
                turns.checkpoint()
                chunk = compute_chunk(self._model, key)
                turns.release()
            store.put(chunk)
            request.outcome.computed_chunks += 1

    def _spans(self, reuse: Reuse, identity: str, token_ids: Sequence[int]) -> Spans:
        """Return the chunks of a prompt that are stored now; entries may come and go at any time."""
        spans = reuse.store.find(identity, self._prefix(reuse, identity), token_ids)
        return [span for span in spans if span.start + span.tokens < len(token_ids)]

    def _missing(self, reuse: Reuse, identity: str) -> list[ChunkKey]:
        """Return the keys of a request's documents, and of the tokens before the first, that are not stored."""
        prefix, namespace = self._prefix(reuse, identity), reuse.store.namespace
        keys = [ChunkKey(identity, prefix, span.token_ids, namespace) for span in reuse.prompt.spans()]
        opening = reuse.prompt.ids[: reuse.prompt.opening]
        if len(opening) > len(default_sink(self._model)):
            keys.append(ChunkKey(identity, (), opening, namespace))
        return [key for key in dict.fromkeys(keys) if not reuse.store.contains(key)]

    def _prefix(self, reuse: Reuse, identity: str) -> tuple[int, ...]:
        """Return the prefix of the chunks, as a `BlendCache` of the same settings would choose it."""
        prefix = self._config.chunk_prefix_ids
        return reuse.store.longest_prefix(identity) or default_sink(self._model) if prefix is None else tuple(prefix)

    def _blend(self, request: Request, turns: Turns) -> None:
        """Run the blended prefill of a whole prompt, and copy its K and V into blocks."""
        state, paged = request.state, self.paged
        cache = BlendCache(self._model, request.reuse.store, self._config)
        cache.get_seq_length()  # the cache watches the model's calls from here on
        inputs: Mapping[str, Any] = {"input_ids": torch.tensor([state.initial_tokens], device=paged.device)}
        if request.reuse.images:
            images, state.fewer_positions = _model_inputs(self._model, state.initial_tokens, request.reuse.images)
            inputs = cache.inputs_with_images(**images)
        output = self._model(**inputs, **cache_argument(self._model, cache), use_cache=True, logits_to_keep=1)
        layers: list[Any] = cache.layers
        rows = paged.rows_of(state.request_id, len(state.initial_tokens))
        for index, layer in enumerate(layers):
            turns.checkpoint()
            paged.write(index, rows, layer.keys[0], layer.values[0])
        request.logits = output.logits[0, -1:]
        outcome, report = request.outcome, cache.report  # the report is not kept: it has tensors of every layer
        outcome.how, outcome.charged_budget = "blended", report.charged_budget
        outcome.reused_tokens, outcome.recomputed_tokens = report.reused_tokens, sum(map(len, report.chosen_columns))

    def _root(self, spans: Spans, reuse: Reuse, token_ids: Sequence[int]) -> int:
        """Return the hash at which those of blended blocks start: of all that K and V depend on beside the tokens."""
        about = {
            "fingerprint": spans[0].key.fingerprint,
            "namespace": reuse.store.namespace,
            "salt": reuse.salt,
            "config": self._config.to_dict(),
            "chunks": [(span.start, span.key.digest, span.first, span.tokens) for span in spans],
            "before": list(token_ids if self._sees_question else token_ids[: spans[0].start]),
        }
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


def _model_inputs(
    model: nn.Module, token_ids: Sequence[int], image_inputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Return the arguments of a forward of tokens with images, and how many positions fewer than tokens they take.

    There are more tokens than in the prompt if an answer is computed again.
    """
    ids = torch.tensor([token_ids])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, value in image_inputs.items():
        is_mark = name.endswith(KINDS_OF_TOKENS)
        inputs[name] = nn.functional.pad(value, (0, ids.shape[1] - value.shape[1])) if is_mark else value
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    rope_index = getattr(model.base_model, "get_rope_index", None)
    if rope_index is None:
        return inputs, 0
    arguments = {name: value for name, value in inputs.items() if name in inspect.signature(rope_index).parameters}
    return inputs, int(rope_index(**arguments)[1])
