# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendedBatching`: transformers' continuous batching, whose blocks blended prefills fill with stored chunks.

`docs/serving.md` shows its use. The steps are those of transformers, except that each request attends to its own keys.
A blended prefill runs between two steps: for `stall_s` up to the end of a decoder layer, or in proportion to the time
that the steps take.
"""

import copy
import inspect
import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..errors import ConfigError, HfBlendError, PromptError, UnsupportedModelError
from ..model.anatomy import text_config
from ..model.author import Author, author_of
from ..model.canary import canary_of
from ..model.fingerprint import fingerprint
from ..model.quantised import silence_casts
from ..prefill.layout import layout_of
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from .refusals import check_end_tokens, check_model, check_names, check_settings

check_names()

from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402
from transformers.generation.continuous_batching.continuous_api import (  # noqa: E402
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import (  # noqa: E402
    update_cb_config_after_cache_creation,
)
from transformers.generation.continuous_batching.requests import (  # noqa: E402
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.utils import drain_queue, stream_context  # noqa: E402

from .attention import walk_requests  # noqa: E402
from .blending import Prefilled, Request, Reuse  # noqa: E402
from .healing import HEALING, Healing  # noqa: E402
from .paged import BlendedPagedCache  # noqa: E402
from .prefills import BlendedPrefills  # noqa: E402
from .sampling import NotNumbers, Watch  # noqa: E402
from .scheduler import BlendedScheduler  # noqa: E402
from .turns import Share  # noqa: E402

__all__ = ["BlendedBatching", "Prefilled"]

logger = logging.getLogger(__name__)

MOST_FAILURES = 3  # of the engine's own request, one after the other, before the engine ends
PROBE = "hf_blend: does the engine still compute?"  # the name of that request


class BlendedBatching(ContinuousBatchingManager):
    """Continuous batching that reuses stored chunks anywhere in a prompt.

    A request whose prompt has stored chunks gets a blended prefill before the engine sees it, the one that a
    `BlendCache` of its own would compute; then the engine decodes. Other requests run as in stock continuous batching,
    which shares exact prefixes.
    """

    def __init__(
        self,
        model: nn.Module,
        store: ChunkStore,
        config: BlendConfig | None = None,
        *,
        generation_config: GenerationConfig | None = None,
        batching: ContinuousBatchingConfig | None = None,
        stall_s: float | None = None,
        heal: bool = False,
        **settings: Any,
    ) -> None:
        """Prepare an engine; `start`, or a `with` block, starts it.

        `config` are the settings of blends, by default those of the model's recipe in the store; `settings` replace
        some of them. `generation_config` and `batching` are as in transformers. `stall_s` is how long, in seconds, a
        blended prefill may hold up a step; None is in proportion to the steps. With `heal` an idle engine computes
        exact blocks of the conversations that it has blended, which their next turns use.
        """
        config = config or store.recipe(model, is_blind=True).config(is_blind=True)
        self.blend_config = BlendConfig.from_dict({**config.to_dict(), **settings})
        batching = copy.copy(batching) if batching is not None else ContinuousBatchingConfig()
        generation_config = copy.deepcopy(generation_config or model.generation_config)
        check_end_tokens(generation_config.eos_token_id)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1
        check_model(model)
        check_settings(self.blend_config, batching, generation_config, stall_s)
        silence_casts(model, self)
        BlendCache(model, store, self.blend_config)  # refuses the model, or calibrates and tests it
        layout_of(model, fingerprint(model))
        canary_of(model)
        self.on_stall: Callable[[float], Any] = lambda seconds: None  # how long the requests that decode have waited
        self.store, self._share = store, Share(stall_s)
        self._heals = heal
        self.healing: Healing | None = None  # until it starts, and without `heal`
        self._author: Author | None = None  # of the K and V in the blocks; None if it cannot be said
        self._failures, self._begun = 0, time.monotonic()
        self._hooks: list[RemovableHandle] = []
        self._lock = threading.RLock()
        batching.use_async_batching, batching.use_cuda_graph, batching.max_blocks_per_request = False, False, 0
        check_names()
        super().__init__(model, generation_config, batching)
        self._watch = Watch()
        self.logit_processor.logits_processor.insert(0, self._watch)
        self.logit_processor.do_processing = True
        self.prefills = BlendedPrefills(model, self.blend_config, self._wake_up_loop.set)

    def add_request(  # type: ignore[override]
        self,
        input_ids: Sequence[int] | TextPrompt,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        *,
        store: ChunkStore | None = None,
        salt: Sequence[int] = (),
        blend: bool = True,
        **settings: Any,
    ) -> str:
        """Add a request and return its name. May be called from any thread.

        `store` has its chunks, by default the engine's; `salt` keeps its blocks from requests with another one;
        without `blend` it runs as in stock continuous batching. The other arguments are as in transformers.
        """
        self._check_known(settings)
        check_end_tokens(settings.get("eos_token_id"))
        prompt = input_ids if isinstance(input_ids, TextPrompt) else TextPrompt(tuple(map(int, input_ids)))
        tokens = list(prompt.ids)
        new = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        self._check_length(len(tokens), new)
        self._check_tokens(tokens)
        with self._lock:
            if request_id is None:
                request_id = f"blended_{self._request_counter}"
                self._request_counter += 1
            if self.prefills.knows(request_id):
                raise ConfigError(f"there is a request {request_id!r} already. Give each its own name, or none.")
            reuse = Reuse(store or self.store, prompt, tuple(salt), is_blended=blend and len(tokens) > 1)
            self.prefills.expect(request_id, reuse)
            accepted = None
            try:
                accepted = super().add_request(tokens, request_id, new, **settings)
            finally:
                if accepted is None:
                    self.prefills.withdraw(request_id)
        if accepted is None:
            raise ConfigError(
                "a request was added to an engine that is not running, or is about to stop. Call start(), or make a "
                "new one."
            )
        return accepted

    def outcome(self, request_id: str) -> Prefilled | None:
        """Return what a request's prefill cost; None before the engine has taken it from its queue, or long after."""
        return self.prefills.outcomes.get(request_id)

    def forget_handler(self, request_id: str) -> None:
        """Remove the handler of a request that `register_result_handler` set: a cancelled request never ends."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        end_tokens = self.generation_config.eos_token_id
        return frozenset(end_tokens if isinstance(end_tokens, list | tuple) else [end_tokens])

    @property
    def stuck_s(self) -> float:
        """Seconds for which nothing has moved although requests are under way."""
        processor = self.batch_processor
        is_stepping = processor is not None and bool(processor.scheduler.active_requests)
        return max(self.prefills.stuck_s, time.monotonic() - self._begun if is_stepping else 0.0)

    @property
    def lengths(self) -> dict[str, int]:
        """The most tokens of a prompt and its answer together: the model's positions, and the engine's cache."""
        longest = getattr(text_config(self.model), "max_position_embeddings", None)
        config = self.continuous_batching_config
        capacity = config.num_blocks * config.page_size if config.num_blocks else None
        limits = {"positions": longest, "tokens of cache": capacity}
        return {what: limit for what, limit in limits.items() if limit is not None}

    @property
    def paged(self) -> BlendedPagedCache:
        """The engine's cache, while it runs."""
        if self.batch_processor is None:
            raise ConfigError("the engine has no cache before it runs. Call start() first.")
        cache: BlendedPagedCache = self.batch_processor.cache  # type: ignore[assignment]
        return cache

    def start(self) -> None:
        """Start the engine's thread."""
        if self.batch_processor is None:
            has_number = self.continuous_batching_config.num_blocks is not None  # before the engine writes its own
            try:
                self.batch_processor = self._create_batch_processor()  # here, so that the caller sees why it fails
            except Exception as error:
                if has_number or isinstance(error, HfBlendError):
                    raise
                raise ConfigError(
                    "num_blocks=None came, with which transformers fits the cache into the memory that is left, but "
                    f"it found no number of blocks that does: {type(error).__name__}: {error} Pass num_blocks."
                ) from error
        if not self._hooks:
            self._hooks = walk_requests(self.model)
            if hasattr(self.model.base_model, "get_rope_index"):
                self._hooks.append(self.model.register_forward_pre_hook(self._move_positions, with_kwargs=True))
        super().start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause as in transformers; requests under way are computed again if the model is another one afterwards."""
        with super().pause():
            try:
                yield
            finally:
                self._note_author(self.batch_processor.scheduler)  # type: ignore[union-attr]

    def stop(self, *args: Any, **settings: Any) -> None:
        """Stop, as in transformers: by default when every request is done."""
        super().stop(*args, **settings)
        if not self.is_running():
            self.prefills.close()
            while self._hooks:
                self._hooks.pop().remove()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        self.stop(hard_stop=kind is not None)
        self.destroy()

    def _check_length(self, tokens: int, new: int | None) -> None:
        if new is not None and (not isinstance(new, int) or new < 1):
            raise PromptError(f"max_new_tokens={new!r}, expected a whole number from 1 on. Ask for a token at least.")
        total = tokens + (new or 1)
        for what, limit in self.lengths.items():
            if total > limit:
                raise PromptError(
                    f"the prompt has {tokens} tokens and up to {new} are to come, but there are {limit} {what}. "
                    "Shorten the prompt, or ask for fewer tokens."
                )
        if not tokens:
            raise PromptError("the prompt has 0 tokens, but at least one is expected. Give it some text.")

    def _check_known(self, settings: Mapping[str, Any]) -> None:
        """Refuse in the caller's thread what the engine would refuse in its own."""
        own = inspect.signature(ContinuousBatchingManager.add_request).parameters
        try:
            self.logit_processor.check_kwargs({name: value for name, value in settings.items() if name not in own})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a request came with {sorted(settings)}: {error}. Leave unknown ones out.") from error

    def _check_tokens(self, tokens: list[int]) -> None:
        """Refuse a token that the embeddings lack: all requests of its step would fail."""
        size = self.model.get_input_embeddings().weight.shape[0]
        odd = [token for token in (min(tokens), max(tokens)) if not 0 <= token < size]
        if odd:
            raise PromptError(f"the prompt holds the token id {odd[0]}, but there are {size}, from 0 on. Correct it.")

    def _create_batch_processor(self) -> Any:
        """Make a processor as in transformers, with our cache and our scheduler, for which it has no argument."""
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        config, settings = text_config(self.model), self.continuous_batching_config
        keeps_few = getattr(self.model, "_supports_logits_to_keep", None)
        with _Untouched():
            cache = BlendedPagedCache(
                config=config,
                continuous_batching_config=settings,
                device=self.model.device,
                distributed_helper=self.distributed_helper,
                dtype=self.model.dtype,
                model_supports_logits_to_keep=callable(keeps_few) and keeps_few(),
            )
        if list(cache.cache_allocators) != ["full_attention"]:
            raise UnsupportedModelError(
                f"the engine keeps {', '.join(cache.cache_allocators)} for {type(self.model).__name__}, but blended "
                "blocks hold full attention alone. Use a BlendCache for each request."
            )
        update_cb_config_after_cache_creation(
            cb_config=settings, num_blocks=cache.num_blocks, max_batch_tokens=cache.max_batch_tokens
        )
        scheduler = BlendedScheduler(
            self.prefills,
            cache=cache,
            safety_margin=settings.safety_margin,
            max_requests_per_batch=settings.max_requests_per_batch,
        )
        if self._heals:
            self.healing = scheduler.healing = Healing(cache, self.prefills, scheduler.safety_margin)
        processor = ContinuousBatchProcessor(
            cache=cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=settings,
            logit_processor=self.logit_processor,
            input_queue=None,  # `_read_queues` does it
            cancel_queue=None,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )
        spared_tokens = cache.page - 1 if self._heals else 0  # only whole blocks are healed
        self.prefills.use(cache, processor.inputs_and_outputs.compute_stream, spared_tokens)
        return processor

    def _generation_loop_body(self, processor: Any, bootstrapping: bool) -> bool:
        """Run a step of the engine, and before it a turn of a blended prefill."""
        scheduler, self._begun = processor.scheduler, time.monotonic()
        scheduler.in_step = []
        is_decoding = bool(scheduler.active_requests)
        try:
            self._read_queues(scheduler)
            turn_s, begun = self._advance(scheduler, is_decoding), time.monotonic()
            self._begin_healing(scheduler)
            continues = super()._generation_loop_body(processor, bootstrapping)
        except Exception as error:
            self._recover(processor, error)
            self._end_healing(scheduler, error)
            return True
        self._end_healing(scheduler)
        self._share.note(turn_s, time.monotonic() - begun, is_decoding)
        scheduler.passed()
        if scheduler.in_step:
            self._failures = 0
            if any(request.state.request_id == PROBE for request in scheduler.in_step):
                self.output_router.result_handlers.pop(PROBE, None)
        return bool(continues) or not self.input_queue.empty()

    def _begin_healing(self, scheduler: BlendedScheduler) -> None:
        """If nobody waits, let the step that comes heal some tokens of a conversation."""
        status = self.background_thread_status
        is_idle = not scheduler.has_pending_requests() and self.input_queue.empty()
        is_asked = status.local_status != status.DONT_STOP or status.is_pause_requested()
        if self.healing is None or not is_idle or is_asked:
            return
        step, author = self.healing.next_step(), self._author
        if step is None:
            return
        self._note_author(scheduler)
        if self._author == author:
            self._ignore_output(HEALING)
            scheduler.add_waiting_request(self.healing.begin(step))

    def _end_healing(self, scheduler: BlendedScheduler, error: Exception | None = None) -> None:
        """Let the blocks of a step that healed go to the prefix cache."""
        if self.healing is not None and self.healing.is_running:
            scheduler.drop(HEALING)
            self.healing.end(error)

    def _read_queues(self, scheduler: BlendedScheduler) -> None:
        """Take new requests and cancellations from their queues."""
        if states := drain_queue(self.input_queue):
            self._note_author(scheduler)
        for state in states:
            scheduler.add_waiting_request(state)
        for request_id in drain_queue(self.cancel_queue):
            scheduler.set_request_cancellation(request_id)
        scheduler.clear_cancelled_requests()  # before a blend of one may end

    def _note_author(self, scheduler: Any) -> None:
        """If the model is another one than before, compute all requests again, and share no block of the former."""
        try:
            author = author_of(self.model)
        except HfBlendError:  # the model has a hook
            author = None
        self.paged.shares = author is not None
        if author == self._author:
            return
        self._author = author
        if self.healing is not None:
            self.healing.author = author
        for state in [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]:
            scheduler.put_back(state)
        self.paged.evict_cached_blocks()

    def _advance(self, scheduler: BlendedScheduler, is_decoding: bool) -> float:
        """Give a turn to the blended prefill that is running; return the seconds that it took."""
        begun = time.monotonic()
        for request in self.prefills.advance(self._share.turn_s(is_decoding), scheduler.may_grow()):
            self._admit(request)
        turn_s = time.monotonic() - begun
        if is_decoding:
            self.on_stall(turn_s)
        return turn_s

    def _generation_step(self) -> None:
        super()._generation_step()
        self._watch.check(sum(request.has_new_token for request in self.batch_processor.scheduler.in_step))  # type: ignore

    def _move_positions(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Subtract from the positions of a step what images take fewer of them than tokens."""
        if not isinstance(kwargs.get("cache"), PagedAttentionCache):
            return None  # not a step of the engine
        rows = [request for request in self.batch_processor.scheduler.in_step for _ in range(request.query_length)]  # type: ignore
        moved = [getattr(request.state, "fewer_positions", 0) for request in rows]
        positions = kwargs["position_ids"].clone()
        positions[0, : len(moved)] += torch.tensor(moved, dtype=positions.dtype, device=positions.device)
        return args, {**kwargs, "position_ids": positions}

    def _admit(self, request: Request) -> None:
        """Let the engine see a request: with filled blocks, or, if its prefill failed, without any."""
        state, outcome, error = request.state, request.outcome, request.error
        if error is None and request.logits is not None:
            try:
                self._enter(state, *self._draw(state, request.logits))
                return
            except Exception as fault:
                error = fault
        if error is not None:
            self.prefills.failures += 1
            then = "fails" if request.reuse.images else "is computed in full"
            logger.warning("request %s %s: %s: %s", state.request_id, then, type(error).__name__, error)
            outcome.tokens, outcome.reason = 0, f"{type(error).__name__}: {error}"
            self.paged.free_blocks(state.request_id, no_cache=True)
            if request.reuse.images:  # the engine has none
                self._fail(state, error)
                return
        if outcome.tokens:
            request.filled_tokens = outcome.tokens
        else:
            outcome.how = "plain"

    def _draw(self, state: RequestState, logits: Tensor) -> tuple[int, float | None]:
        """Return a token drawn from `[1, vocabulary]` logits as in a step, and its log probability if asked."""
        processor: Any = self.batch_processor
        processors, runner = self.logit_processor, processor.model_runner
        with torch.no_grad(), stream_context(processor.inputs_and_outputs.compute_stream):
            last = torch.tensor(state.initial_tokens[-1:], device=logits.device)
            arguments = torch.zeros(processors.tensors_required, 1, dtype=torch.int32, device=logits.device)
            processors.prepare_tensor_args([FutureRequestState(state, True, {}, 1)], arguments)
            scores = processors(last, logits.float(), arguments)
            self._watch.check(1)
            drawn = torch.zeros(2, 1, dtype=torch.int32, device=logits.device)
            runner._sample(scores[None], drawn)
            return int(drawn[0]), float(drawn[1].view(torch.float32)) if runner.return_logprobs else None

    def _enter(self, state: RequestState, token: int, logprob: float | None) -> None:
        """Let a request decode, whose blocks are filled, behind its first token."""
        scheduler: Any = self.batch_processor.scheduler  # type: ignore[union-attr]
        scheduler.activate(state)
        state.remaining_prefill_tokens, state.position_offset = [], len(state.initial_tokens)
        state.status = RequestStatus.DECODING
        is_over = state.update_and_check_completion(token, logprob)
        if is_over:
            scheduler.finish_request(state.request_id)
            scheduler.block_new_requests = False
        if is_over or state.streaming:
            self.output_router.deliver(state.to_generation_output())

    def _fail(self, state: RequestState, error: BaseException) -> None:
        """End a request with an error."""
        processor: Any = self.batch_processor
        processor._handle_request_error(error, state)
        processor.scheduler.drop(state.request_id)

    def _recover(self, processor: Any, error: Exception) -> None:
        """After a step that failed, fail the request that caused it and go on; a stock engine ends here.

        If the step had several requests, each is computed again, alone. After one has failed alone, a request of the
        engine's own shows whether the engine still works: the engine ends if that fails again and again.
        """
        scheduler = processor.scheduler
        run = blamed = scheduler.unfinished()
        if isinstance(error, NotNumbers):  # stock attention spreads them to the rows of others
            drawn = [request for request in scheduler.in_step if request.has_new_token]
            odd = [*(drawn[row] for row in error.rows), *(request for request in run if not request.has_new_token)]
            blamed = [request for request in run if request in odd]
        is_clear = len(blamed) == 1
        for request in run:
            if request not in blamed or not is_clear:
                scheduler.put_back(request.state, is_suspect=request in blamed)
                continue
            if request.state.request_id == PROBE:
                scheduler.drop(PROBE)
            else:
                self._fail(request.state, error)
        if not blamed or blamed[0].state.request_id == PROBE:
            self._failures += 1
            if self._failures > MOST_FAILURES:
                raise error
        if not blamed or is_clear:
            self._probe(scheduler)

    def _probe(self, scheduler: BlendedScheduler) -> None:
        """Queue a request of one token, to be computed alone; its result goes nowhere."""
        self._ignore_output(PROBE)
        scheduler.put_back(RequestState(PROBE, [0], max_new_tokens=1), is_suspect=True)

    def _ignore_output(self, request_id: str) -> None:
        """Let nobody receive the output of a request of the engine's own."""
        loop: Any = SimpleNamespace(call_soon_threadsafe=lambda call, *output: call(*output))
        self.output_router.result_handlers[request_id] = (lambda output: None, loop)


class _Untouched(TorchFunctionMode):
    """Makes large zeros on the CPU of pages that take no memory before something is written to them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = kwargs or {}
        on_cpu = str(arguments.get("device", "cpu")) == "cpu"
        if function is torch.zeros and on_cpu and arguments.get("dtype") == torch.uint8 and type(args[0]) is int:
            return torch.frombuffer(mmap.mmap(-1, args[0]), dtype=torch.uint8)
        return function(*args, **arguments)
