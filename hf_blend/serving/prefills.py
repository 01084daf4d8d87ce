# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blended prefills of requests that wait, in turns with the engine.

A request of which nothing is stored goes to the engine at once. The others of a tenant are prefilled one by one; the
tenant that has had least of the model goes first, also before a prefill of another that is under way. The first token
is drawn from the logits of the blend. Where the blocks are those of an earlier request there are no logits: then
`PagedAttentionCache.search_prefix_match` answers up to where these blocks go. `docs/serving.md` says why not always.
"""

import hashlib
import inspect
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation.continuous_batching.utils import stream_context

from .. import plugins
from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..model.anatomy import decoder_layers, default_sink
from ..model.canary import compute_chunk
from ..model.fingerprint import fingerprint
from ..model.modality import KINDS_OF_TOKENS
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from ..store.chunk import ChunkKey, Found
from ..threads import Workers
from .paged import salted
from .shares import Shares
from .turns import Turns

__all__ = ["BlendedPrefills", "Prefilled", "Reuse"]

logger = logging.getLogger(__name__)

KEPT_REPORTS = 4096
LANES = 4  # prefills under way, each of another tenant
LOOK_S = 0.001  # how often the engine looks who asks, while it waits for one that finishes a layer
FETCH_S = 2.0  # how long a chunk on another machine is waited for; a later one is computed

Spans = Sequence[Found]
Token = tuple[int, float | None]  # and its log probability, where the engine gives these


@dataclass(frozen=True)
class Reuse:
    """Where a request's chunks come from."""

    store: ChunkStore
    prompt: TextPrompt
    salt: tuple[int, ...] = ()
    is_blended: bool = True

    @property
    def pictures(self) -> Mapping[str, Any]:
        """What a forward is given for the images of the prompt; empty if it has none."""
        return getattr(self.prompt, "arguments", {})


@dataclass
class Prefilled:
    """What happened to a request before the engine began with it."""

    how: str = "waiting"
    tokens: int = 0
    prefix_tokens: int = 0
    computed_chunks: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    charged_budget: float | None = None
    reason: str = ""
    begun: float | None = None  # by time.perf_counter


@dataclass(eq=False)
class _Held:
    """A request that the engine does not see yet."""

    state: Any
    reuse: Reuse
    outcome: Prefilled
    since: float = field(default_factory=time.monotonic)
    is_found: Future[bool] | None = None  # whether there is something to blend
    identity: str = ""  # the model's fingerprint, looked at between two steps
    first: Token | None = None  # which its blend has drawn

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.reuse.store.namespace


class BlendedPrefills:
    """The requests that are held back, and the threads that fill their blocks."""

    def __init__(self, engine: Any) -> None:
        """`engine` is a `BlendedBatching`."""
        config: BlendConfig = engine.blend_config
        self._engine, self._config = engine, config
        self._model: nn.Module = engine.model
        self._make_turns = partial(Turns, engine._wake_up_loop.set, engine._settle, engine._clock)
        self._lanes = [self._make_turns()]
        self._running: dict[Turns, _Held] = {}  # whose blocks each lane fills
        self.shares = Shares()
        selector = plugins.load("selectors", config.selector)(config.selector_options, seed=config.seed)
        self._sees_question = bool(selector.needs_question or selector.needs_full_prefill)
        self._reuse: dict[str, Reuse] = {}  # of the requests that are not over
        self._finished: tuple[str, Reuse] | None = None  # the last one that ended; the engine may put it back
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._ready: dict[str, int] = {}
        self._finder = Workers("hf_blend-find")
        self.failures = 0  # prefills that ended in an exception
        self.outcomes: OrderedDict[str, Prefilled] = OrderedDict()

    @property
    def turns(self) -> Turns:
        """Those of the thread that asks; in other threads those of the first lane."""
        return next((lane for lane in self._lanes if lane.is_mine), self._lanes[0])

    def tenant_of(self, request_id: str) -> str:
        """Whose request it is, by the namespace of the store."""
        reuse = self._reuse.get(request_id)
        return "" if reuse is None else reuse.store.namespace

    def expect(self, request_id: str, reuse: Reuse) -> None:
        """A request is about to be added; one under way of a tenant that had more yields. Called from any thread."""
        tenant = reuse.store.namespace
        self.shares.come(tenant, [one.store.namespace for one in list(self._reuse.values())])
        self._reuse[request_id] = reuse
        self._hurry(tenant)

    def offer(self, state: Any) -> None:
        """The engine has a new request, or one that it had to put back into its queue."""
        if self._finished is not None and self._finished[0] == state.request_id:
            self._reuse.setdefault(*self._finished)
        reuse = self._reuse.get(state.request_id)
        is_held = reuse is not None and reuse.is_blended
        self.outcomes[state.request_id] = Prefilled("waiting" if is_held else "plain")
        while len(self.outcomes) > KEPT_REPORTS:
            self.outcomes.popitem(last=False)
        if reuse is not None and is_held:
            self._held[state.request_id] = _Held(state, reuse, self.outcomes[state.request_id])

    def knows(self, request_id: str) -> bool:
        """Whether a request of this name was added and is not over."""
        return request_id in self._reuse

    def holds(self, request_id: str) -> bool:
        """Whether the engine may not see a request yet."""
        return request_id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def stuck_s(self) -> float:
        """For how many seconds the first request that is held has not moved; 0 where none is."""
        first = next(iter(list(self._held.values())), None)  # asked from other threads
        return 0.0 if first is None else time.monotonic() - max(first.since, *(lane.moved for lane in self._lanes))

    def finish(self, request_id: str) -> None:
        """A request has its answer, or has failed; or the engine takes its blocks, and offers it again."""
        reuse = self._reuse.pop(request_id, None)
        self._ready.pop(request_id, None)
        self._finished = None if reuse is None else (request_id, reuse)

    def drop(self, request_id: str) -> None:
        """A request is over: cancelled, or never taken up."""
        self._reuse.pop(request_id, None)
        self._ready.pop(request_id, None)
        self._held.pop(request_id, None)
        for lane, held in list(self._running.items()):  # asked from other threads, too
            if held.state.request_id == request_id:
                lane.cancel()

    def close(self) -> None:
        """All requests are over: end the threads."""
        for request_id in [*self._held, *self._reuse, *self._ready]:
            self.drop(request_id)
        self._finished = None
        self._finder.close()
        for lane in self._lanes:
            lane.close()

    def take_ready(self, request_id: str) -> int:
        """How many tokens of a prompt are in its blocks already; 0 for one that the engine computes."""
        return self._ready.pop(request_id, 0)

    def note_prefix(self, request_id: str, tokens: int) -> None:
        """So many first tokens of a prompt were found as an exact prefix."""
        if request_id in self.outcomes:
            self.outcomes[request_id].prefix_tokens = tokens

    def left(self, state: Any) -> int:
        """How many tokens of a prompt are to be computed, as far as is known."""
        return len(state.remaining_prefill_tokens) - self._ready.get(state.request_id, 0)

    def salt_of(self, request_id: str) -> Sequence[int]:
        """What the tokens of a prompt are salted with before they are hashed; empty: nothing."""
        reuse = self._reuse.get(request_id)
        return () if reuse is None else reuse.salt

    def advance(self, seconds: float) -> None:
        """Between two steps of the engine: begin with the next requests, and let one under way go on.

        For less than 0 seconds none continues.
        """
        self._take_over()
        self._look_up()
        while (held := self._next()) is not None:
            self._begin(held)
        if seconds >= 0:
            any(lane.give(seconds) for lane in self._asking())  # one that waits for blocks does not move
        self._await_turns()
        self._take_over()

    def are_ahead(self, tenants: Iterable[str]) -> bool:
        """Whether a request is held of a tenant that had less than the others of these."""
        asking = {held.tenant for held in self._held.values()} if self.shares.are_several else ()
        return any(self._lead(tenant, tenants) > 0 for tenant in asking)

    def overtake(self, tenants: Iterable[str]) -> None:
        """Within a step of these tenants: let prefills of others go on until they have had as much.

        None is waited for: it asks for the model by the next layer.
        """
        self._let_pass(tenants)
        self._await_turns()

    def _await_turns(self) -> None:
        """Wait for those that yield. While they finish a layer, prefills of tenants that had less run beside it."""
        while holding := [lane for lane in self._running if lane.has_turn]:
            self._engine.take_up()
            self._let_pass({self._running[lane].tenant for lane in holding})
            holding[0].await_end(LOOK_S)

    def _let_pass(self, tenants: Iterable[str]) -> None:
        self._look_up()
        while (held := self._next()) is not None and self._lead(held.tenant, tenants) > 0:
            self._begin(held)
        has_moved = True
        while has_moved:
            self._take_over()
            has_moved = any(
                (lead := self._lead(self._running[lane].tenant, tenants)) > 0 and lane.give(lead)
                for lane in self._asking()  # one that waits for blocks does not move
            )

    def _lead(self, tenant: str, tenants: Iterable[str]) -> float:
        """By how much a tenant has had less than the others of these; 0 where there are none."""
        others = [self.shares.of(one) for one in tenants if one != tenant]
        return max(0.0, min(others) - self.shares.of(tenant)) if others else 0.0

    def _asking(self) -> list[Turns]:
        """Those that wait for a turn, the one of the tenant that had least first."""
        asking = (lane for lane in self._running if lane.is_asking)
        return sorted(asking, key=lambda lane: self.shares.of(self._running[lane].tenant))

    def _hurry(self, tenant: str) -> None:
        """Let those under way of tenants that had more yield at their next layer."""
        for lane, held in list(self._running.items()):
            if self.shares.of(held.tenant) > self.shares.of(tenant):
                lane.hurry()

    def _begin(self, held: _Held) -> None:
        """Begin with a request in a lane that is free."""
        if all(lane in self._running for lane in self._lanes):
            self._lanes.append(self._make_turns())
        lane = next(lane for lane in self._lanes if lane not in self._running)
        self._running[lane] = held
        lane.on_ask = lambda: self._hurry(held.tenant)
        lane.on_turn = lambda seconds: self.shares.add(held.tenant, seconds)
        try:
            held.identity = fingerprint(self._model)
            lane.start(lambda: self._run(held))
        except Exception as error:  # no thread can be made
            lane.error = error

    def _look_up(self) -> None:
        """Have looked up what is stored of each new request, and release those of which nothing is."""
        for held in list(self._held.values()):
            if held.is_found is None:
                try:
                    held.is_found = self._find(held.reuse)
                except Exception as fault:  # no thread can be made, or the model is refused: not the fault of a step
                    held.is_found = Future()
                    held.is_found.set_exception(fault)
            if held in self._running.values() or not held.is_found.done():
                continue
            error = held.is_found.exception()
            if error is not None or not held.is_found.result():
                del self._held[held.state.request_id]
                self._release(held, error)

    def _find(self, reuse: Reuse) -> Future[bool]:
        """Look up whether there is something to blend, beside the engine; named documents always are."""
        found: Future[bool] = Future()
        if reuse.prompt.known or reuse.pictures:
            found.set_result(True)
            return found
        identity = fingerprint(self._model)
        found = self._finder.submit(lambda: bool(self._spans(reuse, identity, reuse.prompt.ids)))
        found.add_done_callback(lambda _: self.turns.wake())
        return found

    def _next(self) -> _Held | None:
        """The request to begin with: of the tenant that had least, if those under way are of tenants with more."""
        busy = {held.tenant: self.shares.of(held.tenant) for held in self._running.values()}
        ready = [held for held in self._held.values() if held.is_found is not None and held.is_found.done()]
        first = min(
            (held for held in ready if held not in self._running.values() and held.tenant not in busy),
            key=lambda held: self.shares.of(held.tenant),
            default=None,
        )
        is_behind = first is not None and self.shares.of(first.tenant) >= min(busy.values(), default=float("inf"))
        return None if is_behind or len(busy) == LANES else first

    def _take_over(self) -> None:
        """Let the engine see the requests whose prefill is over, whatever became of that."""
        for lane, held in list(self._running.items()):
            if lane.is_busy:
                continue
            del self._running[lane]
            if self._held.get(held.state.request_id) is held:  # else it was cancelled
                del self._held[held.state.request_id]
                self._release(held, lane.error)

    def _release(self, held: _Held, error: BaseException | None) -> None:
        """Let the engine see a request; if its prefill failed, without what that has done."""
        outcome, request_id = held.outcome, held.state.request_id
        if error is not None:
            self.failures += 1
            then = "fails" if held.reuse.pictures else "is computed in full"
            logger.warning("request %s %s: %s: %s", request_id, then, type(error).__name__, error)
            outcome.tokens, outcome.reason = 0, f"{type(error).__name__}: {error}"
            self._engine.paged.free_blocks(request_id, no_cache=True)
            if held.reuse.pictures:  # the engine has none
                self._engine.fail(held.state, error)
                return
        if error is None and held.first is not None:
            self._engine.enter(held.state, held.first)
        elif outcome.tokens:
            self._ready[request_id] = outcome.tokens
        else:
            outcome.how = "plain"

    def _run(self, held: _Held) -> None:
        """In the thread: fill the blocks of one request."""
        stream = self._engine.batch_processor.inputs_and_outputs.compute_stream
        with torch.no_grad(), stream_context(stream), self.turns.at_layers(decoder_layers(self._model)):
            held.outcome.begun = time.perf_counter()
            held.outcome.tokens = self._filled(held)
            self.turns.checkpoint()  # from here to the end the engine waits

    def _filled(self, held: _Held) -> int:
        """How many of a prompt's first tokens are in its blocks now."""
        state, reuse, paged = held.state, held.reuse, self._engine.paged
        spans = self._found(held)
        if not spans and not reuse.pictures:
            return 0
        exact, least = (spans[0].start, spans[-1].start + spans[-1].tokens) if spans else (0, 0)
        ids = salted(state.initial_tokens, reuse.salt)
        root = self._root(spans, reuse, state.initial_tokens) if spans else 0
        fetched = []
        for span in spans:  # into memory, while the engine runs
            fetched.append(reuse.store.get(span.key, FETCH_S))
            self.turns.release()
        self.turns.checkpoint()
        if not reuse.pictures:  # ids do not tell which images are in blocks: these are not shared
            if paged.count_exact(ids) >= least:
                held.outcome.reason = "all chunks lie in an exact prefix that is in the engine's cache"
                return 0
            if shared := paged.share_blended(state, ids[:-1], exact, root, least):
                held.outcome.how = "shared"
                return shared
        scheduler = self._engine.batch_processor.scheduler
        while not (scheduler.may_grow() and paged.reserve(state, len(ids))):
            self.turns.checkpoint(end_turn=True)  # blocks come back as others finish
        self._blend(held)
        del fetched
        is_planned = self._spans(reuse, held.identity, state.initial_tokens) == spans
        paged.register(state.request_id, ids if is_planned and not reuse.pictures else (), exact, root, least)
        return len(ids)

    def _found(self, held: _Held) -> Spans:
        """Where chunks stand in a prompt that are stored; those that must be are computed first."""
        reuse, token_ids, identity = held.reuse, held.state.initial_tokens, held.identity
        for key in self._missing(reuse, identity):
            with reuse.store.timed(key):
                self.turns.checkpoint()
                chunk = compute_chunk(self._model, key)
                self.turns.release()
            reuse.store.put(chunk)
            held.outcome.computed_chunks += 1
        return self._spans(reuse, identity, token_ids)

    def _spans(self, reuse: Reuse, identity: str, token_ids: Sequence[int]) -> Spans:
        """The chunks of a prompt that are stored now; one may be evicted, or come from another server, at any time."""
        spans = reuse.store.find(identity, self._prefix(reuse, identity), token_ids)
        return [span for span in spans if span.start + span.tokens < len(token_ids)]

    def _missing(self, reuse: Reuse, identity: str) -> list[ChunkKey]:
        """Chunks of a request, and what comes before the first of them, that are not stored."""
        prefix, namespace = self._prefix(reuse, identity), reuse.store.namespace
        keys = [ChunkKey(identity, prefix, span.token_ids, namespace) for span in reuse.prompt.spans()]
        opening = reuse.prompt.ids[: reuse.prompt.opening]
        if len(opening) > len(default_sink(self._model)):
            keys.append(ChunkKey(identity, (), opening, namespace))
        return [key for key in dict.fromkeys(keys) if not reuse.store.contains(key)]

    def _prefix(self, reuse: Reuse, identity: str) -> tuple[int, ...]:
        """What chunks are behind, as a lone cache would take it."""
        given = self._config.chunk_prefix_ids
        return reuse.store.longest_prefix(identity) or default_sink(self._model) if given is None else tuple(given)

    def _blend(self, held: _Held) -> None:
        """Run the blended prefill of a whole prompt, copy its K and V, and draw the first token."""
        state, paged = held.state, self._engine.paged
        cache = BlendCache(self._model, held.reuse.store, self._config)
        cache.get_seq_length()  # from here on it sees the model's call
        inputs: Mapping[str, Any] = {"input_ids": torch.tensor([state.initial_tokens], device=paged.device)}
        if held.reuse.pictures:
            given, state.fewer_positions = _model_inputs(self._model, state.initial_tokens, held.reuse.pictures)
            inputs = cache.inputs_with_images(**given)
        output = self._model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers: list[Any] = cache.layers
        rows = paged.rows_of(state.request_id, len(state.initial_tokens))
        for index, layer in enumerate(layers):
            self.turns.checkpoint()
            paged.write(index, rows, layer.keys[0], layer.values[0])
        held.first = self._engine.draw(state, output.logits[0, -1:])
        outcome, report = held.outcome, cache.report  # which holds tensors of every layer
        outcome.how, outcome.charged_budget = "blended", report.charged_budget
        outcome.reused_tokens, outcome.recomputed_tokens = report.reused_tokens, sum(map(len, report.chosen_columns))

    def _root(self, spans: Spans, reuse: Reuse, token_ids: Sequence[int]) -> int:
        """What the hashes of blended blocks begin at: all that their K and V depend on beside the tokens in them."""
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
    model: nn.Module, token_ids: Sequence[int], pictures: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """What a forward of some tokens with images is given, and how many positions fewer they take than tokens.

    There may be more tokens than the prompt had: of an answer that is computed again.
    """
    ids = torch.tensor([token_ids])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name, value in pictures.items():
        is_mark = name.endswith(KINDS_OF_TOKENS)
        given[name] = nn.functional.pad(value, (0, ids.shape[1] - value.shape[1])) if is_mark else value
    given = {name: value.to(model.device) for name, value in given.items()}
    place = getattr(model.base_model, "get_rope_index", None)
    if place is None:
        return given, 0
    taken = {name: value for name, value in given.items() if name in inspect.signature(place).parameters}
    return given, int(place(**taken)[1])
