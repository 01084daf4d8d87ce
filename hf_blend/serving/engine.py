# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendedBatching`: transformers' continuous batching, with prompts whose chunks are stored blended into its blocks.

`docs/serving.md` shows its use. The engine's steps are stock, but that each request attends to its own keys alone.
Between two of them a blended prefill runs for `stall_s` and up to a layer, or in proportion to what the steps of those
that decode take; that of a tenant that has had less than the others in a step runs between two layers of it.
"""

import copy
import inspect
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
from ..model.anatomy import decoder_layers, text_config
from ..model.attention import STOCK, is_flash
from ..model.canary import canary_of
from ..model.fingerprint import fingerprint
from ..model.quantised import silence_casts
from ..prefill.layout import layout_of
from ..prompt.pieces import TextPrompt
from ..store import ChunkStore
from .upstream import check_names

check_names()

from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager  # noqa: E402
from transformers.generation.continuous_batching.requests import (  # noqa: E402
    FutureRequestState,
    RequestState,
    RequestStatus,
)
from transformers.generation.continuous_batching.utils import drain_queue  # noqa: E402

from .attention import walk_requests  # noqa: E402
from .paged import BlendedPagedCache  # noqa: E402
from .prefills import BlendedPrefills, Prefilled, Reuse, Token  # noqa: E402
from .sampling import NotNumbers, Watch  # noqa: E402
from .scheduler import BlendedScheduler  # noqa: E402

__all__ = ["BlendedBatching"]

MOST_FAILURES = 3  # of the engine's own request, one after the other, before it gives up
PROBE = "hf_blend: does the engine still compute?"  # the name of that request
TURN_STEPS = 4.0  # of those that decode, for as long as which a prefill runs between two: then more decode together
IDLE_TURN_S = 0.1  # of a prefill while nobody decodes; new requests are looked for behind it


class BlendedBatching(ContinuousBatchingManager):
    """Continuous batching that reuses stored chunks anywhere in a prompt.

    A request whose prompt holds stored chunks gets a blended prefill, as a lone `BlendCache` would compute it, before
    the engine sees it; the engine then runs its last token and decodes. Others run as in stock continuous batching,
    with its sharing of exact prefixes.
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
        **settings: Any,
    ) -> None:
        """Prepare an engine; `start`, or a `with` block, begins it."""
        config = config or store.recipe(model, is_blind=True).config(is_blind=True)
        self.blend_config = BlendConfig.from_dict({**config.to_dict(), **settings})
        batching = copy.copy(batching) if batching is not None else ContinuousBatchingConfig()
        generation_config = copy.deepcopy(generation_config or model.generation_config)
        _check_end_tokens(generation_config.eos_token_id)
        if generation_config.eos_token_id is None:
            generation_config.eos_token_id = -1
        _check_model(model)
        _check_settings(self.blend_config, batching, generation_config, stall_s)
        silence_casts(model, self)
        BlendCache(model, store, self.blend_config)  # calibrates and tests the model, or refuses it
        layout_of(model, fingerprint(model))
        canary_of(model)
        self.on_stall: Callable[[float], Any] = lambda seconds: None  # told how long those that decode waited
        self.store, self.stall_s = store, stall_s
        self._due_s = 0.0  # what a prefill may take of the time between two steps
        self._given_s = 0.0  # what prefills took since the last step
        self._charged = 0.0  # up to when this step is charged, by the clock of the work
        self._stepping: int | None = None  # the thread that runs a step now
        self._failures, self._begun = 0, time.monotonic()
        self._hooks: list[RemovableHandle] = []
        self._lock = threading.Lock()
        batching.use_async_batching, batching.use_cuda_graph, batching.max_blocks_per_request = False, False, 0
        check_names()
        super().__init__(model, generation_config, batching)
        self._watch = Watch()
        self.logit_processor.logits_processor.insert(0, self._watch)
        self.logit_processor.do_processing = True
        self._clock = time.thread_time if model.device.type == "cpu" else time.monotonic  # of the work that is shared
        self.prefills = BlendedPrefills(self)

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
        """Add a request; may be called from any thread."""
        self._check_known(settings)
        _check_end_tokens(settings.get("eos_token_id"))
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
            given = None
            try:
                given = super().add_request(tokens, request_id, new, **settings)
            finally:
                if given is None:
                    self.prefills.drop(request_id)
        if given is None:
            raise ConfigError(
                "a request was added to an engine that is not running, or is about to stop. Call start(), or make a "
                "new one."
            )
        return given

    def outcome(self, request_id: str) -> Prefilled | None:
        """What a request's prefill cost; None for one that the engine has not taken up, or has forgotten."""
        return self.prefills.outcomes.get(request_id)

    def forget_handler(self, request_id: str) -> None:
        """Deliver nothing more of a request to whom `register_result_handler` named: a cancelled one never ends."""
        with self.output_router._lock:
            self.output_router.result_handlers.pop(request_id, None)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Which tokens end an answer."""
        given = self.generation_config.eos_token_id
        return frozenset(given if isinstance(given, list | tuple) else [given])

    @property
    def stuck_s(self) -> float:
        """For how many seconds nothing has moved although requests are under way."""
        processor = self.batch_processor
        is_stepping = processor is not None and bool(processor.scheduler.active_requests)
        return max(self.prefills.stuck_s, time.monotonic() - self._begun if is_stepping else 0.0)

    @property
    def lengths(self) -> dict[str, int]:
        """How many tokens a prompt and its answer may have together: the model's positions, and the engine's cache."""
        longest = getattr(text_config(self.model), "max_position_embeddings", None)
        given = self.continuous_batching_config
        capacity = given.num_blocks * given.page_size if given.num_blocks else None
        known = {"positions": longest, "tokens of cache": capacity}
        return {what: limit for what, limit in known.items() if limit is not None}

    @property
    def _scheduler(self) -> BlendedScheduler:
        """Asked for by the engine's threads alone, while it runs."""
        scheduler: BlendedScheduler = self.batch_processor.scheduler  # type: ignore[assignment,union-attr]
        return scheduler

    @property
    def paged(self) -> BlendedPagedCache:
        """The engine's cache, while it runs."""
        if self.batch_processor is None:
            raise ConfigError("the engine has no cache before it runs. Call start() first.")
        cache: BlendedPagedCache = self.batch_processor.cache  # type: ignore[assignment]
        return cache

    def start(self) -> None:
        """Begin to serve."""
        if self.batch_processor is None:
            is_given = self.continuous_batching_config.num_blocks is not None  # the engine writes its own number there
            try:
                self.batch_processor = self._create_batch_processor()  # here, so that the caller sees why it fails
            except Exception as error:
                if is_given or isinstance(error, HfBlendError):
                    raise
                raise ConfigError(
                    "num_blocks=None came, with which transformers fits the cache into the memory that is left, but "
                    f"it found no number of blocks that does: {type(error).__name__}: {error} Pass num_blocks."
                ) from error
        if not self._hooks:
            configs = {id(one): one for one in (self.model.config, text_config(self.model))}
            self._configs = [(one, vars(one).get("is_causal")) for one in configs.values()]
            self._hooks = walk_requests(self.model)
            if hasattr(self.model.base_model, "get_rope_index"):
                self._hooks.append(self.model.register_forward_pre_hook(self._behind_images, with_kwargs=True))
            self._hooks += [one.register_forward_pre_hook(self._overtake) for one in decoder_layers(self.model)]
        super().start()

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
                    "Shorten the prompt, or lower max_new_tokens."
                )
        if not tokens:
            raise PromptError("the prompt has 0 tokens, but at least one is expected. Give it some text.")

    def _check_known(self, settings: Mapping[str, Any]) -> None:
        """Refuse here what the engine would refuse once it has taken up the request."""
        own = inspect.signature(ContinuousBatchingManager.add_request).parameters
        try:
            self.logit_processor.check_kwargs({name: one for name, one in settings.items() if name not in own})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"a request came with {sorted(settings)}: {error}. Leave unknown ones out.") from error

    def _check_tokens(self, tokens: list[int]) -> None:
        """One token that the embeddings lack would fail all requests of its step."""
        size = self.model.get_input_embeddings().weight.shape[0]
        odd = [token for token in (min(tokens), max(tokens)) if not 0 <= token < size]
        if odd:
            raise PromptError(f"the prompt holds the token id {odd[0]}, but there are {size}, from 0 on. Correct it.")

    def _create_batch_processor(self) -> Any:
        with _Untouched():
            processor = super()._create_batch_processor()
        if list(processor.cache.cache_allocators) != ["full_attention"]:
            raise UnsupportedModelError(
                f"the engine keeps {', '.join(processor.cache.cache_allocators)} for {type(self.model).__name__}, but "
                "blended blocks hold full attention alone. Use a BlendCache for each request."
            )
        BlendedPagedCache.adopt(processor.cache, self.prefills)
        BlendedScheduler.adopt(processor.scheduler, self.prefills, self._advance)
        return processor

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """A step of the engine, and before it a turn of the blended prefill that is under way."""
        scheduler, self._begun = batch_processor.scheduler, time.monotonic()
        scheduler.in_step, self._given_s = [], 0.0
        is_decoding = bool(scheduler.active_requests)
        try:
            goes_on = super()._generation_loop_body(batch_processor, bootstrapping)
        except Exception as error:
            self._recover(batch_processor, error)
            return True
        finally:
            took = time.monotonic() - self._begun - self._given_s
        self._due_s = TURN_STEPS * took + min(0.0, self._due_s) if is_decoding else 0.0
        scheduler.passed()
        if scheduler.in_step:
            self._failures = 0
            if any(one.state.request_id == PROBE for one in scheduler.in_step):
                self.output_router.result_handlers.pop(PROBE, None)
        return bool(goes_on)

    def _advance(self) -> None:
        """Give a turn to the prefill that is under way, before a step: less what it took too long before."""
        is_decoding = bool(self._scheduler.active_requests)
        seconds = self._due_s if self.stall_s is None else self.stall_s
        begun = time.monotonic()
        self.prefills.advance(seconds if is_decoding else IDLE_TURN_S)
        took = time.monotonic() - begun
        self._due_s -= took
        self._given_s += took
        if is_decoding:
            self.on_stall(took)

    def _generation_step(self) -> None:
        self._stepping, self._charged = threading.get_ident(), self._clock()
        try:
            super()._generation_step()
        finally:
            self._stepping = None
            self._charge()
            self._scheduler.fit()
        self._watch.check(sum(one.has_new_token for one in self._scheduler.in_step))

    def _charge(self) -> None:
        """Charge the tenants of the step under way what it took since they were charged last."""
        since, self._charged = self._charged, self._clock()
        self._scheduler.charge(self._charged - since)

    def _overtake(self, module: nn.Module, args: Any) -> None:
        """At a layer of a step, let prefills of tenants go first that have had less than the others in it."""
        if self._stepping != threading.get_ident():
            return
        self._charge()
        self.take_up()
        if not self.prefills.are_ahead(self._scheduler.tokens):
            return
        begun = time.monotonic()
        with _as_between_steps(self._configs):
            self.prefills.overtake(self._scheduler.tokens)
        took = time.monotonic() - begun
        self._charged = self._clock()  # what was lent is none of the step's
        self._given_s += took
        self.on_stall(took)

    def _behind_images(self, module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        """Move the positions of a step's rows whose images take fewer of them than tokens."""
        if self._stepping != threading.get_ident():
            return None
        rows = [one for one in self._scheduler.in_step for _ in range(one.query_length)]
        moved = [getattr(one.state, "fewer_positions", 0) for one in rows]
        positions = given["position_ids"].clone()
        positions[0, : len(moved)] += torch.tensor(moved, dtype=positions.dtype, device=positions.device)
        return args, {**given, "position_ids": positions}

    def take_up(self) -> None:
        """Take up new requests, as the engine does before each step."""
        for state in drain_queue(self.input_queue):
            self._scheduler.add_waiting_request(state)

    def draw(self, state: RequestState, logits: Tensor) -> Token:
        """Draw a request's next token as a step does, from `[1, vocabulary]` logits."""
        processors, runner = self.logit_processor, self.batch_processor.model_runner  # type: ignore[union-attr]
        last = torch.tensor(state.initial_tokens[-1:], device=logits.device)
        arguments = torch.zeros(processors.tensors_required, 1, dtype=torch.int32, device=logits.device)
        processors.prepare_tensor_args([FutureRequestState(state, True, {}, 1)], arguments)
        scores = processors(last, logits.float(), arguments)
        self._watch.check(1)
        found = torch.zeros(2, 1, dtype=torch.int32, device=logits.device)
        runner._sample(scores[None], found)
        return int(found[0]), float(found[1].view(torch.float32)) if runner.return_logprobs else None

    def enter(self, state: RequestState, first: Token) -> None:
        """Let a request decode whose blocks are filled, and whose first token is drawn."""
        self._scheduler.take_up(state)
        state.remaining_prefill_tokens, state.position_offset = [], len(state.initial_tokens)
        state.status = RequestStatus.DECODING
        is_over = state.update_and_check_completion(*first)
        if is_over:
            self._scheduler.finish_request(state.request_id)
            self._scheduler.block_new_requests = False
        if is_over or state.streaming:
            self.output_router.deliver(state.to_generation_output())

    def fail(self, state: RequestState, error: Exception) -> None:
        """End a request with an error."""
        processor: Any = self.batch_processor
        processor._handle_request_error(error, state)
        processor.scheduler.drop(state.request_id)

    def _recover(self, processor: Any, error: Exception) -> None:
        """Fail the request whose fault it is, and serve on; a stock engine ends here.

        Of several in a step each is computed again, alone. After the fault of one, a request of the engine's own shows
        whether it was the engine's: if that fails again and again, the engine ends.
        """
        scheduler = processor.scheduler
        run = blamed = scheduler.unfinished()
        if isinstance(error, NotNumbers):  # in one attention, those of one request reach the rows of others
            drawn = [one for one in scheduler.in_step if one.has_new_token]
            odd = [*(drawn[row] for row in error.rows), *(one for one in run if not one.has_new_token)]
            blamed = [one for one in run if one in odd]
        is_clear = len(blamed) == 1
        for one in run:
            if one not in blamed or not is_clear:
                scheduler.put_back(one.state, is_suspect=one in blamed)
                continue
            if one.state.request_id == PROBE:
                scheduler.drop(PROBE)
            else:
                self.fail(one.state, error)
        if not blamed or blamed[0].state.request_id == PROBE:
            self._failures += 1
            if self._failures > MOST_FAILURES:
                raise error
        if not blamed or is_clear:
            self._probe(scheduler)

    def _probe(self, scheduler: BlendedScheduler) -> None:
        """Let a request of one token follow, alone; nobody is told of it."""
        here: Any = SimpleNamespace(call_soon_threadsafe=lambda call, *given: call(*given))  # in place of a loop
        self.output_router.result_handlers[PROBE] = (lambda output: None, here)
        scheduler.put_back(RequestState(PROBE, [0], max_new_tokens=1), is_suspect=True)

    def _settle(self) -> None:
        """Wait for the device before those that decode go on: the bound is on what they see."""
        if self.model.device.type != "cpu" and self.batch_processor is not None:
            stream = self.batch_processor.inputs_and_outputs.compute_stream
            if stream is not None:
                stream.synchronize()


@contextmanager
def _as_between_steps(configs: Sequence[tuple[Any, bool | None]]) -> Iterator[None]:
    """Put back what a step sets in a model's configs while it lasts; other masks are built with that."""
    during = [vars(config).pop("is_causal", None) for config, _ in configs]
    try:
        for config, value in configs:
            if value is not None:
                config.is_causal = value
        yield
    finally:
        for (config, _), value in zip(configs, during, strict=True):
            vars(config).pop("is_causal", None)
            if value is not None:
                config.is_causal = value


class _Untouched(TorchFunctionMode):
    """Makes zeros on the CPU of pages that take no memory before something is written to them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        on_cpu = str(given.get("device", "cpu")) == "cpu"
        if function is torch.zeros and on_cpu and given.get("dtype") == torch.uint8 and type(args[0]) is int:
            return torch.frombuffer(mmap.mmap(-1, args[0]), dtype=torch.uint8)
        return function(*args, **given)


def _check_model(model: nn.Module) -> None:
    name, config = type(model).__name__, text_config(model)
    attention = str(getattr(model.config, "_attn_implementation", None))
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    windows = kinds - {"full_attention"} if kinds else ({f"a window of {window}"} if window else set())
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", ""))
    alone = "Use a BlendCache for each request."
    refused = (
        (attention != STOCK and not is_flash(attention),
         f"{name} attends by {attention!r}, but blended prefills and the engine share sdpa or flash attention. Load "
         "it with attn_implementation='sdpa'."),
        (windows,
         f"layers of {name} have {', '.join(sorted(map(str, windows)))}, of which the engine keeps the last tokens "
         f"alone, but blended blocks hold every token. {alone}"),
        ("dynamic" in rope or "longrope" in rope,
         f"{name} has rope_type={rope!r}: its frequencies depend on the longest prompt in a step, so requests would "
         f"change each other. {alone}"),
        (getattr(model, "_device_mesh", None) is not None,
         f"{name} is spread over devices by tensor parallelism, but a blended prefill runs on one. Load it without "
         "tp_plan."),
    )  # fmt: skip
    for is_so, complaint in refused:
        if is_so:
            raise UnsupportedModelError(complaint)


def _check_settings(
    config: BlendConfig, batching: ContinuousBatchingConfig, generation: GenerationConfig, stall_s: float | None
) -> None:
    blocks, graphs = batching.num_blocks, batching.use_cuda_graph
    refused = (
        (config.kv_bits is not None, f"kv_bits={config.kv_bits}", "the engine's blocks hold the model's dtype"),
        (config.kv_device_map is not None, f"kv_device_map={config.kv_device_map}",
         "the engine's blocks are on the model's device"),
        (batching.scheduler_type != "fifo", f"scheduler_type={batching.scheduler_type!r}", "only 'fifo' holds back"),
        (not batching.allow_block_sharing, "allow_block_sharing=False", "blended blocks enter by the shared prefix"),
        (bool(batching.use_async_batching), "use_async_batching=True", "a prefill needs the model between steps"),
        (any(graphs if isinstance(graphs, tuple) else [graphs]), f"use_cuda_graph={graphs}",
         "a prefill would break a captured graph"),
        (batching.cpu_offload_space != 0, f"cpu_offload_space={batching.cpu_offload_space}", "a swap hashes again"),
        (blocks is not None and (type(blocks) is not int or blocks < 1), f"num_blocks={blocks!r}",
         "a number from 1 on is expected"),
        (bool(batching.max_blocks_per_request), f"max_blocks_per_request={batching.max_blocks_per_request}",
         "the decode fast path writes K and V by itself"),
        ((generation.num_return_sequences or 1) != 1, f"num_return_sequences={generation.num_return_sequences}",
         "a fork begins before the last prompt token"),
        (stall_s is not None and not stall_s >= 0, f"stall_s={stall_s}", "seconds from 0 on are expected"),
    )  # fmt: skip
    for is_so, given, reason in refused:
        if is_so:
            raise ConfigError(f"{given} cannot be served with blended prompts: {reason}. Leave it at its default.")


def _check_end_tokens(given: Any) -> None:
    """Refuse here what would fail in the engine, or would never end an answer."""
    ids = list(given) if isinstance(given, list | tuple) else [given]
    if given is not None and not all(type(one) is int for one in ids):
        raise ConfigError(
            f"eos_token_id={given!r} came, expected the id of a token, a list of such, or None. Give whole numbers."
        )
