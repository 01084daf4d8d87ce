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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import vllm
from prometheus_client import Counter as Counted
from torch import Tensor, nn
from transformers import AutoTokenizer
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.utils import create_metric_per_engine

from ...cache.blend_cache import BlendCache
from ...config import BlendConfig
from ...errors import ConfigError, HfBlendError, UnsupportedModelError
from ...model.anatomy import stock_cache
from ...model.cache_keyword import cache_argument
from ...model.canary import COARSE_TOLERANCE, TOLERANCE
from ...model.context import default_prefix
from ...model.fingerprint import fingerprint
from ...prompt.pieces import Span
from ...store import ChunkStore
from ...tenants import read_tenants
from .plan import NamedPrompt, Reuse, plan_salt, read_params
from .weights import FastLinear, load_copy, model_over, speed_up

__all__ = ["BlendConnector"]

logger = logging.getLogger("vllm.hf_blend")  # below vLLM's own, which has a handler

TESTED = ("0.32",)
OWN = {  # settings of the connector, beside the fields of BlendConfig
    "store": None, "remote": None, "memory_bytes": 1 << 30, "tenants": None, "allow_copy": False,
}  # fmt: skip
CHECKED_TOKENS = 256  # of the prompt by which vLLM and transformers are compared
LEAST_CHECKED = 16
COUNTED = {
    "blended_requests": "Requests whose documents were blended.",
    "failed_requests": "Requests with documents that were left to vLLM because a blend failed.",
    "reused_tokens": "Tokens of prompts whose stored K and V were used.",
    "recomputed_tokens": "Tokens of stored chunks in prompts that were computed again.",
    "computed_chunks": "Chunks that were not stored and were computed.",
}


@dataclass
class Load:
    """A request whose blocks are to be filled from token `start` on; the last token of `ids` is not among them."""

    request_id: str
    ids: tuple[int, ...]
    reuse: Reuse
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
    sink: tuple[int, ...]


@dataclass
class Verdict(KVConnectorWorkerMetadata):
    """How far K and V of vLLM and of transformers are apart; an error where they could not be compared."""

    error: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """There is one worker."""
        return self


class BlendStats(KVConnectorStats):
    """Counts of some steps, by the names of `COUNTED`."""

    def reset(self) -> None:
        """Begin at 0."""
        self.data = dict[str, Any]()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of other steps."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM writes in its log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return True if nothing was counted."""
        return not any(self.data.values())


class BlendMetrics(KVConnectorPromMetrics):
    """The counters `vllm:hf_blend_…` of each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        make = metric_types[Counted]
        self._counters = {
            name: create_metric_per_engine(make(f"vllm:hf_blend_{name}", text, labelnames), per_engine)
            for name, text in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what some steps did."""
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)


class BlendConnector(KVConnectorBase_V1):
    """Blends stored chunks into vLLM's blocks: what both of its forms, `Scheduler` and `Worker`, have."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Self:
        """Make the one that vLLM asks for; it knows the name of this class alone."""
        half: Any = Worker if role == KVConnectorRole.WORKER else Scheduler
        made: Self = super().__new__(half)
        return made

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_engine(vllm_config, kv_cache_config)
        self._kv_transfer_config.kv_load_failure_policy = "recompute"  # its default fails the request
        settings = dict(self._kv_transfer_config.kv_connector_extra_config)
        own = {name: settings.pop(name, default) for name, default in OWN.items()}
        self._config, self._allows_copy = BlendConfig.from_dict(settings), own["allow_copy"]
        self._stores = Stores(own, own["memory_bytes"] if role == KVConnectorRole.WORKER else 0)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        """Make of counts what vLLM can add up."""
        return BlendStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> BlendMetrics:
        """Make the counters of vLLM's registry."""
        return BlendMetrics(*args)

    def shutdown(self) -> None:
        """Close the stores."""
        self._stores.close()

    def _does_nothing(self, *args: Any, **more: Any) -> Any:
        """What vLLM asks of both, and the other does, or none: no request runs before all of its blocks are filled."""

    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _does_nothing
    start_load_kv = wait_for_save = wait_for_layer_load = save_kv_layer = _does_nothing


class Scheduler(BlendConnector):
    """Decides which requests are blended."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._needs_salt = bool(vllm_config.cache_config.enable_prefix_caching)
        self._identity: Identity
        self._reuse: dict[str, Any] = {}  # by request; None where nothing is blended
        self._loaded: dict[str, int] = {}  # the number of preemptions at which a request was last loaded
        self._loads: list[Load] = []
        self._verdict: Verdict | None = None
        self._is_checking = False
        self._tokenizer: Any = None

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Identity]) -> None:
        """Learn who the model is."""
        self._identity = next(iter(metadata.values()))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Say how many tokens behind those that vLLM has come from here, and whether they come later."""
        name = request.request_id
        if self._verdict is None or self._verdict.error or self._loaded.get(name) == request.num_preemptions:
            return 0, False
        if name not in self._reuse:
            self._reuse[name] = self._find(request)
        reuse = self._reuse[name]
        if reuse is None or num_computed_tokens >= reuse.spans[-1].stop:
            return 0, False  # nothing to reuse; or all of it is in blocks of an earlier request with the same salt
        tokens = max(0, request.num_prompt_tokens - 1 - num_computed_tokens)
        return tokens, tokens > 0

    def _find(self, request: Any) -> Reuse | None:
        """The documents of a request, if they may be blended."""
        if request.lora_request or request.mm_features or request.prompt_embeds is not None:
            return None
        ids = request.prompt_token_ids
        try:
            reuse = read_params(request.kv_transfer_params, ids, self._load_tokenizer)
            if reuse.spans and self._needs_salt:
                self._check_salt(request, reuse)
            elif not self._needs_salt and (reuse.spans or reuse.tenant in self._stores.secrets):
                reuse = Reuse(reuse.spans or self._search(ids, reuse.tenant), reuse.tenant)
        except Exception as error:
            logger.warning("request %s is not blended: %s: %s", request.request_id, type(error).__name__, error)
            return None
        spans = tuple(span for span in reuse.spans if span.stop < len(ids))
        return Reuse(spans, reuse.tenant) if spans else None

    def _check_salt(self, request: Any, reuse: Reuse) -> None:
        self._stores.of(reuse.tenant)  # refuses one that is not known
        secret = self._stores.secrets[reuse.tenant]
        salt = plan_salt(request.prompt_token_ids, reuse.spans, self._config, tenant=reuse.tenant, secret=secret)
        if request.cache_salt != salt:
            raise ConfigError(
                f"cache_salt={request.cache_salt!r:.20} came, expected what plan_salt makes of its documents: without "
                "it other requests would find its blended blocks as an exact prefix. Send it, or start vLLM with "
                "--no-enable-prefix-caching."
            )

    def _search(self, ids: Sequence[int], tenant: str) -> tuple[Span, ...]:
        """The stored chunks in a prompt that names none."""
        matches = self._stores.of(tenant).find(self._identity.fingerprint, self._identity.sink, ids)
        return tuple(Span(match.start, match.key.token_ids, match.first, match.tokens) for match in matches)

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._vllm_config.model_config)
        return self._tokenizer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks of a request that were promised tokens."""
        if not num_external_tokens:
            return
        ids, reuse = tuple(request.prompt_token_ids), self._reuse[request.request_id]
        self._loaded[request.request_id] = request.num_preemptions
        start = len(ids) - 1 - num_external_tokens
        self._loads.append(Load(request.request_id, ids, reuse, blocks.get_block_ids()[0], start))

    def build_connector_meta(self, scheduler_output: Any) -> BlendMetadata:
        """Tell the worker what to do in this step."""
        step, self._loads = BlendMetadata(self._loads), []
        if self._verdict is None and not self._is_checking:
            step.check = next(self._comparable(scheduler_output), None)
            self._is_checking = step.check is not None
        return step

    def _comparable(self, output: Any) -> Iterator[tuple[list[int], list[int]]]:
        """Prompts of which this step computes enough tokens."""
        for new in output.scheduled_new_reqs:
            is_plain = not (new.lora_request or new.mm_features or new.prompt_embeds is not None)
            tokens = min(new.num_computed_tokens + output.num_scheduled_tokens[new.req_id], CHECKED_TOKENS)
            ids = (new.prompt_token_ids or [])[:tokens]
            if is_plain and len(ids) >= LEAST_CHECKED:
                yield ids, new.block_ids[0]

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn how the comparison ended: blend from now on, or never."""
        verdict = connector_output.kv_connector_worker_meta
        if verdict is not None:
            self._verdict = verdict
            if verdict.error:
                logger.error("nothing is blended: %s", verdict.error)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its blocks are not needed."""
        self._reuse.pop(request.request_id, None)
        self._loaded.pop(request.request_id, None)
        return False, None


class Worker(BlendConnector):
    """Computes, and writes vLLM's blocks."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self.model: nn.Module
        self._layers: list[nn.Module] = []  # vLLM's attention layers, in the model's order
        self._identity: Identity | None = None
        self._finished: set[str] = set()
        self._failed: set[int] = set()
        self._verdict: Verdict | None = None
        self._counted = Counter[str]()

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Make the model that computes, of the one of who calls this."""
        vllm_model = _model_of_caller()
        speed_up(vllm_model)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in kv_caches]
        try:
            self.model = model_over(vllm_model, self._vllm_config.model_config)
        except UnsupportedModelError:
            if not self._allows_copy:
                raise
            self.model = load_copy(self._vllm_config.model_config, next(iter(kv_caches.values())).device)
        ids = tuple(range(3 * LEAST_CHECKED))
        with ChunkStore.open("memory://") as store:  # refuses what cannot be blended, and finds out about the model
            self._blend(ids, (Span.whole(LEAST_CHECKED, ids[LEAST_CHECKED : 2 * LEAST_CHECKED]),), store)
        if self._config.chunk_prefix_ids is None:
            prefix = default_prefix(self.model, load_tokenizer(self._vllm_config.model_config))
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
        try:
            layers, report = self._blend(load.ids, load.reuse.spans, self._stores.of(load.reuse.tenant))
            stop = len(load.ids) - 1
            indices = self._indices(load.blocks, load.start, stop)
            for own, (keys, values) in zip(self._layers, layers, strict=True):
                _write(own, own.kv_cache, keys[load.start : stop], values[load.start : stop], indices)
            logger.debug("request %s is blended: %s", load.request_id, report)
            stored, reused = report.exact_tokens + report.reusable_tokens, report.reused_tokens
            tokens = {"reused_tokens": reused, "recomputed_tokens": stored - reused}
            self._counted.update(blended_requests=1, computed_chunks=report.computed_chunks, **tokens)
        except Exception as error:
            logger.warning("request %s is computed by vLLM: %s: %s", load.request_id, type(error).__name__, error)
            self._failed.update(load.blocks[load.start // self._block_size :])
            self._counted["failed_requests"] += 1
        self._finished.add(load.request_id)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _blend(self, ids: tuple[int, ...], spans: tuple[Span, ...], store: ChunkStore) -> tuple[list[Any], Any]:
        """K and V of each layer, `[tokens, kv_heads, head_dim]` each, and the report."""
        cache = BlendCache(self.model, store, self._config)
        inputs = cache.expect(None, [NamedPrompt(ids, spans)])
        with FastLinear():
            self.model(**inputs, **cache_argument(self.model, cache), use_cache=True, logits_to_keep=1)
        if cache.report.fallback_reason:
            raise HfBlendError(cache.report.fallback_reason)
        layers: list[Any] = cache.layers
        return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers], cache.report

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
            worst = max(map(self._distance, self._layers, cache.layers, [blocks] * len(self._layers)))
            most = TOLERANCE.get(self.model.dtype, COARSE_TOLERANCE)
            if worst > most:
                raise UnsupportedModelError(
                    f"K and V of vLLM differ from those of {type(self.model).__name__} by {worst:.2g} of their norm, "
                    f"expected at most {most}. Its cache, its rotary embedding or its kernels are others."
                )
            self._verdict = Verdict("")
        except Exception as error:
            self._verdict = Verdict(f"{type(error).__name__}: {error}")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Name the requests whose blocks are filled, or have failed."""
        finished, self._finished = self._finished, set()
        return None, finished

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that vLLM must compute."""
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> Verdict | None:
        """Say how the comparison ended."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def get_kv_connector_stats(self) -> BlendStats | None:
        """Say what was done since the last call."""
        counted, self._counted = self._counted, Counter[str]()
        return BlendStats(dict(counted)) if counted else None

    def _distance(self, own: Any, layer: Any, blocks: list[int]) -> float:
        """How far a layer's K and V are from those in its blocks, as a share of their norm.

        The order of numbers in a block is the backend's affair: they are written into a copy of the blocks.
        """
        keys, values = layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)
        count = -(-len(keys) // self._block_size)
        size = own.kv_cache.shape[-2]
        rows = self._indices(blocks, 0, count * self._block_size)[::size] // size
        block = own.kv_cache[rows]
        copy = block.clone()
        _write(own, copy, keys, values, self._indices(list(range(count)), 0, len(keys)))
        norm = torch.cat((keys, values)).float().norm()
        return float((copy.float() - block.float()).norm() / norm)

    def _indices(self, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """Where in the cache tokens are, `[tokens]`."""
        tokens = torch.arange(start, stop)
        indices = torch.tensor(blocks)[tokens // self._block_size] * self._block_size + tokens % self._block_size
        return indices.to(self.model.device)


class Stores:
    """The chunk stores of all tenants, each opened when it is needed."""

    def __init__(self, own: Mapping[str, Any], memory_bytes: int) -> None:
        self.secrets: dict[str, bytes | None] = {"": None}
        if own["tenants"]:
            self.secrets = {tenant.name: tenant.secret for tenant in read_tenants(Path(own["tenants"]))}
        self._open: dict[str, ChunkStore] = {}
        self._settings = {"remote": own["remote"], "memory_bytes": memory_bytes // len(self.secrets)}
        self._location = own["store"]

    def of(self, tenant: str) -> ChunkStore:
        """The store of a tenant."""
        if tenant not in self.secrets:
            raise ConfigError(f"tenant={tenant!r:.60} came, expected one of the {len(self.secrets)} that are known.")
        if tenant not in self._open:
            self._open[tenant] = ChunkStore.open(self._location, namespace=tenant, **self._settings)
        return self._open[tenant]

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._open.popitem()[1].close()


def load_tokenizer(model_config: Any) -> Any:
    """The tokenizer that vLLM was started with; None if it was told to load none."""
    if model_config.skip_tokenizer_init:
        return None
    return AutoTokenizer.from_pretrained(model_config.tokenizer)


def _write(layer: Any, kv_cache: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> None:
    """Write K and V, `[tokens, kv_heads, head_dim]` each, as the layer writes its own."""
    layer.impl.do_kv_cache_update(layer, keys.contiguous(), values.contiguous(), kv_cache, indices)


def _model_of_caller() -> nn.Module:
    """The model of the runner that registers its caches: vLLM hands it to no connector."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "get_model"):
            model: nn.Module = runner.get_model()
            return model
        frame = frame.f_back
    raise ConfigError(f"no model runner of vLLM {vllm.__version__} calls register_kv_caches. Use a tested version.")


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what cannot be blended, before a request comes."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    odd = [type(spec).__name__ for spec in specs if type(spec) is not FullAttentionSpec or spec.sliding_window]
    rope = str(getattr(model.hf_text_config, "rope_parameters", None) or {})
    allows_copy = vllm_config.kv_transfer_config.kv_connector_extra_config.get("allow_copy", False)
    refused = (
        (not vllm.__version__.startswith(TESTED), f"vLLM {vllm.__version__}", f"expected {' or '.join(TESTED)}"),
        (parallel.world_size > 1, f"world_size={parallel.world_size}", "a blended prefill runs on one device"),
        (len(specs) != 1, f"{len(specs)} groups of layers", "all layers must keep their K and V alike"),
        (bool(odd), f"a cache of {', '.join(odd)}", "only full attention is kept whole"),
        (vllm_config.cache_config.cache_dtype != "auto", f"kv_cache_dtype={vllm_config.cache_config.cache_dtype}",
         "blended K and V have the model's dtype"),
        (model.quantization is not None and not allows_copy, f"quantization={model.quantization}",
         "the weights are no rows that transformers can use; allow_copy loads them a second time"),
        ("dynamic" in rope or "longrope" in rope, "a rotary embedding that depends on the prompt's length",
         "requests would change each other"),
    )  # fmt: skip
    for is_so, setting, reason in refused:
        if is_so:
            raise ConfigError(f"BlendConnector cannot serve {setting}: {reason}.")
