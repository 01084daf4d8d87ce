# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The connector: what vLLM's scheduler asks about a request, and what its worker does for it.

vLLM makes one connector in its scheduler and one in its worker. The scheduler's finds a request's documents and
answers that all of its prompt but the last token comes from here, later. vLLM gives the request blocks and holds it
back. The worker's runs the blended prefill, as a lone `BlendCache` does, and writes K and V into these blocks by
the attention layers' own method. Then vLLM runs the last token and decodes. Whatever fails ends in blocks that vLLM
computes itself.

Nothing is blended before a prompt that vLLM has computed was computed by transformers, too, with the same K and V.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import vllm
from torch import Tensor, nn
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from ...cache.blend_cache import BlendCache
from ...config import BlendConfig
from ...errors import ConfigError, HfBlendError, UnsupportedModelError
from ...model.anatomy import cache_argument, stock_cache
from ...model.capture import COARSE_TOLERANCE, TOLERANCE, default_prefix
from ...model.identity import fingerprint
from ...prompt.pieces import Prompt, Span
from ...store import ChunkStore
from ...tenants import read_tenants
from .interface import missing_attributes, missing_fields, missing_methods, parameter_names, refuse_missing
from .plan import NamedDocuments, plan_salt, read_params
from .weights import FastLinear, load_copy, model_over, speed_up

__all__ = ["BlendConnector"]

logger = logging.getLogger("vllm.hf_blend")  # below vLLM's own, which has a handler

# Settings of the connector, beside the fields of BlendConfig
SETTINGS: dict[str, Any] = {
    "store": None,
    "remote": None,
    "memory_bytes": 1 << 30,
    "tenants": None,
    "allow_copy": False,
}

CHECKED_TOKENS = 256  # of the prompt by which vLLM and transformers are compared
LEAST_CHECKED = 16

# What is read of vLLM's objects; beside it the methods of the connectors are checked, and imports by their names
CONFIG_ATTRIBUTES = (
    "cache_config.block_size",
    "cache_config.cache_dtype",
    "cache_config.enable_prefix_caching",
    "compilation_config.static_forward_context",
    "kv_transfer_config.kv_connector_extra_config",
    "kv_transfer_config.kv_load_failure_policy",
    "model_config.dtype",
    "model_config.enable_sleep_mode",
    "model_config.hf_text_config",
    "model_config.model",
    "model_config.quantization",
    "model_config.revision",
    "model_config.skip_tokenizer_init",
    "model_config.tokenizer",
    "parallel_config.world_size",
)
REQUEST_ATTRIBUTES = (
    "cache_salt",
    "kv_transfer_params",
    "lora_request",
    "mm_features",
    "num_preemptions",
    "num_prompt_tokens",
    "prompt_embeds",
    "prompt_token_ids",
    "request_id",
)
NEW_REQUEST_FIELDS = (
    "block_ids",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "prompt_embeds",
    "prompt_token_ids",
    "req_id",
)
WRITE_PARAMETERS = ["layer", "key", "value", "kv_cache", "slot_mapping"]


@dataclass
class Load:
    """A request whose blocks are to be filled from token `start` on; the last token of `ids` is not among them."""

    request_id: str
    ids: tuple[int, ...]
    documents: NamedDocuments
    blocks: list[int]
    start: int


@dataclass
class BlendMetadata(KVConnectorMetadata):
    """What the scheduler tells the worker in a step: blocks to be filled, and a prompt to be compared."""

    loads: list[Load] = field(default_factory=list)
    check: tuple[list[int], list[int]] | None = None  # token ids, and the blocks that hold them


@dataclass
class Identity(KVConnectorHandshakeMetadata):
    """What the scheduler must know of the model to find its chunks."""

    fingerprint: str
    chunk_prefix_ids: tuple[int, ...]


@dataclass
class Comparison(KVConnectorWorkerMetadata):
    """How the comparison of K and V of vLLM and of transformers ended: an error, or empty where they are the same."""

    error: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """There is one worker."""
        return self


class BlendConnector(KVConnectorBase_V1):
    """Blends stored chunks into vLLM's blocks: what both of its forms, `Scheduler` and `Worker`, have.

    Of the methods that vLLM asks of both, each form has its own; the other's do nothing. None waits for a layer: no
    request runs before all of its blocks are filled.
    """

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Self:
        """Make the form that vLLM asks for; it knows the name of this class alone."""
        form: Any = Worker if role == KVConnectorRole.WORKER else Scheduler
        connector: Self = super().__new__(form)
        return connector

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_interface(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        self._kv_transfer_config.kv_load_failure_policy = "recompute"  # its default fails the request
        blend_settings = dict(self._kv_transfer_config.kv_connector_extra_config)
        settings = {}
        for name, default in SETTINGS.items():
            settings[name] = blend_settings.pop(name, default)
        if role != KVConnectorRole.WORKER:
            settings["memory_bytes"] = 0  # it only looks chunks up
        self._config = BlendConfig.from_dict(blend_settings)
        self._allows_copy = settings["allow_copy"]
        self._stores = Stores(settings)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise no tokens."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """Tell the worker nothing."""
        return BlendMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def shutdown(self) -> None:
        """Close the stores."""
        self._stores.close()


class Scheduler(BlendConnector):
    """Decides which requests are blended."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._needs_salt = bool(vllm_config.cache_config.enable_prefix_caching)
        self._identity: Identity
        self._documents: dict[str, NamedDocuments] = {}  # by request; of those without spans nothing is blended
        self._loaded: dict[str, int] = {}  # the number of preemptions at which a request was last loaded
        self._loads: list[Load] = []
        self._comparison: Comparison | None = None
        self._is_comparing = False
        self._tokenizer: Any = None

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Identity]) -> None:
        """Learn who the model is."""
        self._identity = next(iter(metadata.values()))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Say how many tokens behind those that vLLM has come from here, and whether they come later."""
        name = request.request_id
        if self._comparison is None or self._comparison.error:
            return 0, False
        if self._loaded.get(name) == request.num_preemptions:
            return 0, False
        if name not in self._documents:
            self._documents[name] = self._find_documents(request)
        documents = self._documents[name]
        if not documents.spans:
            return 0, False
        if num_computed_tokens >= documents.spans[-1].stop:
            return 0, False  # all of them are in blocks of an earlier request with the same salt
        tokens = max(0, request.num_prompt_tokens - 1 - num_computed_tokens)
        return tokens, tokens > 0

    def _find_documents(self, request: Any) -> NamedDocuments:
        """Find the documents of a request that may be blended: those it names, else those that are stored."""
        if not _is_text(request):
            return NamedDocuments()
        ids = request.prompt_token_ids
        try:
            named = read_params(request.kv_transfer_params, ids, self._load_tokenizer)
            spans = named.spans
            if spans:
                self._stores.check_tenant(named.tenant)
                if self._needs_salt:
                    self._check_salt(request, named)
            elif not self._needs_salt and named.tenant in self._stores.secrets:
                spans = self._search(ids, named.tenant)
        except Exception as error:
            logger.warning("request %s is not blended: %s: %s", request.request_id, type(error).__name__, error)
            return NamedDocuments()
        # The last token of a prompt is always vLLM's
        spans = tuple(span for span in spans if span.stop < len(ids))
        return NamedDocuments(spans, named.tenant)

    def _check_salt(self, request: Any, named: NamedDocuments) -> None:
        secret = self._stores.secrets[named.tenant]
        salt = plan_salt(request.prompt_token_ids, named.spans, self._config, tenant=named.tenant, secret=secret)
        if request.cache_salt != salt:
            raise ConfigError(
                f"cache_salt={request.cache_salt!r:.20} came, expected what plan_salt makes of its documents: without "
                "it other requests would find its blended blocks as an exact prefix. Send it, or start vLLM with "
                "--no-enable-prefix-caching."
            )

    def _search(self, ids: Sequence[int], tenant: str) -> tuple[Span, ...]:
        """Find stored chunks in a prompt that names none."""
        store = self._stores.open(tenant)
        spans = []
        for match in store.find(self._identity.fingerprint, self._identity.chunk_prefix_ids, ids):
            spans.append(Span(match.start, match.key.token_ids, match.first, match.tokens))
        return tuple(spans)

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._vllm_config.model_config)
        return self._tokenizer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Keep the blocks of a request that was promised tokens, for the worker to fill."""
        if not num_external_tokens:
            return
        documents = self._documents[request.request_id]
        self._loaded[request.request_id] = request.num_preemptions
        ids = tuple(request.prompt_token_ids)
        start = len(ids) - 1 - num_external_tokens
        block_ids = blocks.get_block_ids()[0]
        self._loads.append(Load(request.request_id, ids, documents, block_ids, start))

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """Tell the worker what to do in this step."""
        step = BlendMetadata(self._loads)
        self._loads = []
        if self._comparison is None and not self._is_comparing:
            step.check = self._find_comparable(scheduler_output)
            self._is_comparing = step.check is not None
        return step

    def _find_comparable(self, output: Any) -> tuple[list[int], list[int]] | None:
        """Find a prompt of which this step computes enough tokens: its token ids and its blocks."""
        for new in output.scheduled_new_reqs:
            if not _is_text(new) or not new.prompt_token_ids:
                continue
            computed = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            ids = new.prompt_token_ids[: min(computed, CHECKED_TOKENS)]
            if len(ids) >= LEAST_CHECKED:
                return ids, new.block_ids[0]
        return None

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn how the comparison ended: blend from now on, or never."""
        comparison = connector_output.kv_connector_worker_meta
        if comparison is not None:
            self._comparison = comparison
            if comparison.error:
                logger.error("nothing is blended: %s", comparison.error)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its blocks are not needed."""
        self._documents.pop(request.request_id, None)
        self._loaded.pop(request.request_id, None)
        return False, None


class Worker(BlendConnector):
    """Computes, and writes vLLM's blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self.model: nn.Module
        self._tokenizer: Any = None  # until the model was checked, with ids that are no text
        self._layers: list[nn.Module] = []  # vLLM's attention layers, in the model's order
        self._identity: Identity | None = None
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._comparison: Comparison | None = None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Make the model that computes, of the one of who calls this."""
        vllm_model = _model_of_caller()
        speed_up(vllm_model)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in kv_caches]
        check_layers(self._layers)
        try:
            self.model = model_over(vllm_model, self._vllm_config.model_config)
        except UnsupportedModelError:
            if not self._allows_copy:
                raise
            self.model = load_copy(self._vllm_config.model_config, next(iter(kv_caches.values())).device)
        ids = tuple(range(3 * LEAST_CHECKED))
        with ChunkStore.open("memory://") as store:  # refuses what cannot be blended, and finds out about the model
            self._blend(ids, (Span.whole(LEAST_CHECKED, ids[LEAST_CHECKED : 2 * LEAST_CHECKED]),), store)
        self._tokenizer = load_tokenizer(self._vllm_config.model_config)
        if self._config.chunk_prefix_ids is None:
            prefix = default_prefix(self.model, self._tokenizer)
            self._config = replace(self._config, chunk_prefix_ids=prefix)
        self._identity = Identity(fingerprint(self.model), self._config.chunk_prefix_ids)
        logger.info("blends %s, fingerprint %.12s…", type(self.model).__name__, self._identity.fingerprint)

    def get_handshake_metadata(self) -> Identity | None:
        """Say who the model is."""
        return self._identity

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks of requests that wait for it."""
        for load in self._get_connector_metadata().loads:
            self._fill(load)

    def _fill(self, load: Load) -> None:
        """Blend a request and write K and V into its blocks; after a failure vLLM computes these."""
        try:
            # Blend
            store = self._stores.open(load.documents.tenant)
            blended, report = self._blend(load.ids, load.documents.spans, store)

            # Write all tokens but those that vLLM has, and the last one, which it runs itself
            stop = len(load.ids) - 1
            slots = self._slots(load.blocks, load.start, stop)
            for layer, (keys, values) in zip(self._layers, blended, strict=True):
                _write(layer, layer.kv_cache, keys[load.start : stop], values[load.start : stop], slots)
            logger.info("request %s is blended: %s", load.request_id, report)
        except Exception as error:
            logger.warning("request %s is computed by vLLM: %s: %s", load.request_id, type(error).__name__, error)
            self._failed.update(load.blocks[load.start // self._block_size :])
        self._finished.add(load.request_id)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _blend(self, ids: tuple[int, ...], spans: tuple[Span, ...], store: ChunkStore) -> tuple[list[Any], Any]:
        """K and V of each layer, `[tokens, kv_heads, head_dim]` each, and the report."""
        cache = BlendCache(self.model, store, self._config)
        inputs = cache.expect(self._tokenizer, [Prompt(ids, spans)])
        with FastLinear():
            self.model(**inputs, **cache_argument(self.model, cache), use_cache=True, logits_to_keep=1)
        if cache.report.fallback_reason:
            raise HfBlendError(cache.report.fallback_reason)
        return [_keys_and_values(layer) for layer in cache.layers], cache.report

    def wait_for_save(self) -> None:
        """Compare, after the forward, K and V that vLLM has computed with those of transformers."""
        check = self._get_connector_metadata().check
        if check is None:
            return
        ids, blocks = check
        try:
            with torch.inference_mode(False), torch.no_grad():
                row = torch.tensor([ids], device=self.model.device)
                cache: Any = stock_cache(self.model)
                self.model(input_ids=row, **cache_argument(self.model, cache), use_cache=True, logits_to_keep=1)
            distances = []
            for layer, cached in zip(self._layers, cache.layers, strict=True):
                distances.append(self._distance(layer, cached, blocks))
            worst = float(torch.tensor(distances).max())
            tolerance = TOLERANCE.get(self.model.dtype, COARSE_TOLERANCE)
            if not worst <= tolerance:  # a NaN is no agreement
                raise UnsupportedModelError(
                    f"K and V of vLLM differ from those of {type(self.model).__name__} by {worst:.2g} of their norm, "
                    f"expected at most {tolerance}. Its cache, its rotary embedding or its kernels are others: serve "
                    "without the connector."
                )
            self._comparison = Comparison("")
        except Exception as error:
            self._comparison = Comparison(f"{type(error).__name__}: {error}")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Name the requests whose blocks are filled, or have failed."""
        finished = self._finished
        self._finished = set()
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that vLLM must compute."""
        failed = self._failed
        self._failed = set()
        return failed

    def build_connector_worker_meta(self) -> Comparison | None:
        """Say how the comparison ended."""
        comparison = self._comparison
        self._comparison = None
        return comparison

    def _distance(self, layer: Any, cached: Any, blocks: list[int]) -> float:
        """Measure how far K and V of a layer in vLLM's blocks are from those cached, as a share of their norm.

        The order of numbers in a block is the backend's affair: the cached ones are written into a copy of the blocks.
        """
        keys, values = _keys_and_values(cached)
        count = -(-len(keys) // self._block_size)  # of blocks
        # A backend may split a block into smaller ones
        kernel_size = layer.kv_cache.shape[-2]
        slots = self._slots(blocks, 0, count * self._block_size)
        rows = slots[::kernel_size] // kernel_size
        computed = layer.kv_cache[rows]
        written = computed.clone()
        _write(layer, written, keys, values, self._slots(list(range(count)), 0, len(keys)))
        norm = torch.cat((keys, values)).float().norm()
        return float((written.float() - computed.float()).norm() / norm)

    def _slots(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Give the slots of the cache that tokens of a request are in, `[tokens]`."""
        tokens = torch.arange(start, stop)
        block_ids = torch.tensor(blocks)[tokens // self._block_size]
        slots = block_ids * self._block_size + tokens % self._block_size
        return slots.to(self.model.device)


class Stores:
    """The chunk stores of all tenants, each opened when it is needed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.secrets: dict[str, bytes | None] = {"": None}
        if settings["tenants"]:
            self.secrets = {tenant.name: tenant.secret for tenant in read_tenants(Path(settings["tenants"]))}
        self._settings = settings
        self._opened: dict[str, ChunkStore] = {}

    def check_tenant(self, tenant: str) -> None:
        """Refuse a tenant that is not known."""
        if tenant not in self.secrets:
            raise ConfigError(
                f"tenant={tenant!r:.60} came, expected one of the {len(self.secrets)} that are known. Add it to the "
                "file of tenants, or send a known name."
            )

    def open(self, tenant: str) -> ChunkStore:
        """Open the store of a tenant, once."""
        self.check_tenant(tenant)
        if tenant not in self._opened:
            self._opened[tenant] = ChunkStore.open(
                self._settings["store"],
                remote=self._settings["remote"],
                memory_bytes=self._settings["memory_bytes"] // len(self.secrets),
                namespace=tenant,
            )
        return self._opened[tenant]

    def close(self) -> None:
        """Close all."""
        for store in self._opened.values():
            store.close()
        self._opened.clear()


def load_tokenizer(model_config: Any) -> Any:
    """Load the tokenizer that vLLM was started with; None if it was started without one."""
    if model_config.skip_tokenizer_init:
        return None
    return AutoTokenizer.from_pretrained(model_config.tokenizer)


def _is_text(request: Any) -> bool:
    """Return True if K and V of a request depend on its token ids alone."""
    return not request.lora_request and not request.mm_features and request.prompt_embeds is None


def _keys_and_values(cached: Any) -> tuple[Tensor, Tensor]:
    """Give K and V of a layer of a cache, `[tokens, kv_heads, head_dim]` each, with keys at their positions."""
    return cached.keys[0].transpose(0, 1), cached.values[0].transpose(0, 1)


def _write(layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Write K and V, `[tokens, kv_heads, head_dim]` each, as the layer writes its own."""
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), kv_cache, slots)


def _model_of_caller() -> nn.Module:
    """Find the model of the runner that registers its caches: vLLM passes it to no connector."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "get_model"):
            model: nn.Module = runner.get_model()
            return model
        frame = frame.f_back
    raise ConfigError(
        f"vLLM {vllm.__version__} calls register_kv_caches from no runner with a method get_model, expected one. Use "
        "a tested version."
    )


def check_interface(vllm_config: Any) -> None:
    """Refuse a vLLM that lacks a name which is used here, before a request comes."""
    request = Request("", [0], SamplingParams(), None)
    missing = [
        *missing_methods(KVConnectorBase_V1, (BlendConnector, Scheduler, Worker)),
        *missing_attributes(vllm_config, CONFIG_ATTRIBUTES),
        *missing_attributes(request, REQUEST_ATTRIBUTES),
        *missing_fields(NewRequestData, NEW_REQUEST_FIELDS),
        *missing_fields(SchedulerOutput, ("scheduled_new_reqs", "num_scheduled_tokens")),
        *missing_fields(KVConnectorOutput, ("kv_connector_worker_meta",)),
        *missing_attributes(KVCacheBlocks, ("get_block_ids",)),
    ]
    refuse_missing(vllm.__version__, missing)


def check_layers(layers: Sequence[Any]) -> None:
    """Refuse attention layers whose K and V cannot be written as they write them."""
    for layer in layers:
        refuse_missing(vllm.__version__, missing_attributes(layer, ("kv_cache", "impl.do_kv_cache_update")))
        names = parameter_names(layer.impl.do_kv_cache_update)
        if names and names != WRITE_PARAMETERS:  # none are named by what passes all of them on
            raise ConfigError(
                f"{type(layer.impl).__name__} of vLLM {vllm.__version__} writes K and V by do_kv_cache_update("
                f"{', '.join(names)}), expected ({', '.join(WRITE_PARAMETERS)}). Choose another attention backend."
            )


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what cannot be blended, before a request comes."""
    model = vllm_config.model_config
    world_size = vllm_config.parallel_config.world_size
    if world_size > 1:
        _refuse(f"world_size={world_size}", "a blended prefill runs on one device")
    if model.enable_sleep_mode:
        _refuse("enable_sleep_mode", "what the worker holds beside its weights is not kept while it sleeps")

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1:
        _refuse(f"{len(specs)} groups of layers", "all layers must keep their K and V alike")
    if type(specs[0]) is not FullAttentionSpec or specs[0].sliding_window:
        _refuse(f"a cache of {type(specs[0]).__name__}", "only full attention is kept whole")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype != "auto":
        _refuse(f"kv_cache_dtype={cache_dtype}", "blended K and V have the model's dtype")

    allows_copy = vllm_config.kv_transfer_config.kv_connector_extra_config.get("allow_copy", False)
    if model.quantization is not None and not allows_copy:
        reason = "the weights are no rows that transformers can use; allow_copy loads them a second time"
        _refuse(f"quantization={model.quantization}", reason)
    rope = str(getattr(model.hf_text_config, "rope_parameters", None) or {})
    if "dynamic" in rope or "longrope" in rope:
        _refuse("a rotary embedding that depends on the prompt's length", "requests would change each other")


def _refuse(setting: str, reason: str) -> None:
    raise ConfigError(f"BlendConnector cannot serve {setting}: {reason}. Serve this model without the connector.")
