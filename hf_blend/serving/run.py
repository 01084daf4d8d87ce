# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Put a server together and run it until it is asked to stop."""

import asyncio
import gc
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import uvicorn
from torch import nn
from transformers import ContinuousBatchingConfig
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError
from ..model.anatomy import text_config
from ..store import ChunkStore
from ..store.memory import available_bytes
from .app import make_app
from .engine import BlendedBatching
from .guard import Guard
from .sampling import add_sampling, greedy
from .service import Service
from .tenants import Tenant, Tenants
from .wire import Limits

__all__ = ["ServerPlan", "check_port", "listen", "make_service", "serve"]

OnStart: TypeAlias = Callable[[str, Callable[[], None]], None]

LAST_S = 3  # seconds in which last errors reach their clients when a server ends
BATCH_REQUESTS = 32  # of one step of the engine
PROMPTS_AT_ONCE = 32  # of the model's full length, for which the cache has room unless memory is scarce


@dataclass(frozen=True)
class ServerPlan:
    """How a server is set up; `blend` is a config, or the settings that differ from the model's recipe."""

    name: str = "smollm2"
    location: str | None = None
    remote: str | None = None
    secret: bytes | None = None
    tenants: Sequence[Tenant] = ()
    metrics_by_tenant: bool = False
    blend: BlendConfig | Mapping[str, Any] = field(default_factory=BlendConfig)
    limits: Limits = field(default_factory=Limits)
    cache_tokens: int | None = None
    batch_tokens: int = 512
    page_tokens: int = 32
    stall_s: float | None = None
    heal: bool = True


def make_service(model: nn.Module, tokenizer: Any, plan: ServerPlan, eyes: Any = None) -> Service:
    """Open the stores and start the engine. With `evaluation.pictures.Eyes`, requests may have images."""
    if eyes is not None:
        plugins.extension("images.encoder").ImageEncoder(model)  # refuses a model whose images cannot be chunks
    rows = list(plan.tenants) or [Tenant()]
    available = available_bytes()
    share, per_token = available // 4 // len(rows), _bytes_per_token(model)
    tokens = _cache_tokens(model, plan, available // 4 // per_token)
    disk_share = _disk_share(plan.location, len(rows))

    def open_store(tenant: Tenant) -> ChunkStore:
        return ChunkStore.open(
            plan.location,
            namespace=tenant.name,
            secret=tenant.secret if tenant.name else plan.secret,
            quota_bytes=disk_share if tenant.quota_bytes is None else tenant.quota_bytes,
            memory_bytes=share,
            remote=plan.remote,
        )

    tenants = Tenants(rows, open_store)
    try:
        store = next(iter(tenants.stores.values()))
        blend = plan.blend
        if not isinstance(blend, BlendConfig):
            blend = store.recipe(model, is_blind=True).config(is_blind=True, **blend)
        prefix = blend.chunk_prefix_ids
        batching = ContinuousBatchingConfig(
            page_size=plan.page_tokens, num_blocks=-(-tokens // plan.page_tokens), max_batch_tokens=plan.batch_tokens,
            max_requests_per_batch=BATCH_REQUESTS, per_request_processors=False,
        )  # fmt: skip
        engine = BlendedBatching(
            model, store, blend,
            chunk_prefix_ids=store.default_prefix(model, tokenizer) if prefix is None else prefix,
            generation_config=greedy(model, plan.limits.new_tokens), batching=batching, stall_s=plan.stall_s,
            heal=plan.heal,
        )  # fmt: skip
        add_sampling(engine.logit_processor)
        engine.start()
    except BaseException:
        tenants.close()
        raise
    cache_gb, share_gb, all_gb = (f"{size / 1e9:.1f} GB" for size in (tokens * per_token, share, available))
    bits = [f" with weights in {kind}" for kind in ("8bit", "4bit") if getattr(model, f"is_loaded_in_{kind}", False)]
    memory = (
        f"{str(model.dtype)[6:]}{''.join(bits)} on {model.device}; up to {cache_gb} for {tokens} tokens of "
        f"requests and {share_gb} for the chunks of each of {len(rows)} tenants, of {all_gb} of memory available"
    )
    return Service(engine, tokenizer, tenants, plan.limits, plan.name, memory, plan.metrics_by_tenant, eyes)


def check_port(host: str, port: int) -> None:
    """Refuse a port that cannot be listened at, before a model is read for it."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ConfigError(f"port {port} of {host} cannot be listened at. Choose another with --port.") from error


def serve(service: Service, host: str, port: int, patience_s: int = 30, on_start: OnStart | None = None) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are answered first."""
    listen(make_app(service), host, port, patience_s, on_start, service)


def listen(
    app: Guard,
    host: str,
    port: int,
    patience_s: int = 30,
    on_start: OnStart | None = None,
    service: Service | None = None,
) -> None:
    """Serve the application of a server, or of a proxy, until SIGINT or SIGTERM.

    `on_start` is called with the URL and a function that stops it.
    """
    protocol: Any = app.connections.guarded(AutoHTTPProtocol)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=patience_s + LAST_S, timeout_keep_alive=30, http=protocol,
    )  # fmt: skip
    try:
        listener = config.bind_socket()
    except SystemExit as error:
        if service is not None:
            service.close(0.0)
        raise ConfigError(f"port {port} of {host} cannot be listened at. Choose another with --port.") from error
    server = uvicorn.Server(config) if service is None else _Draining(config, service, patience_s)
    with listener:
        listener.listen(config.backlog)  # connections wait from now on until the server is up
        number = listener.getsockname()[1]
        if on_start is not None:
            url = f"http://{f'[{host}]' if ':' in host else host}:{number}"
            on_start(url, lambda: setattr(server, "should_exit", True))
        gc.collect()
        gc.freeze()  # a collection among 400,000 objects of libraries stops all threads for 0.25 s, as a blend takes
        try:
            server.run(sockets=[listener])
        finally:
            gc.unfreeze()


class _Draining(uvicorn.Server):
    """A server that answers what is under way before it stops, and after `patience_s` ends it with an error."""

    def __init__(self, config: uvicorn.Config, service: Service, patience_s: int) -> None:
        super().__init__(config)
        self._service, self._patience_s = service, patience_s

    async def shutdown(self, sockets: Any = None) -> None:
        self._service.is_draining = True
        ending = asyncio.get_running_loop().call_later(self._patience_s, self._service.give_up)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def _cache_tokens(model: nn.Module, plan: ServerPlan, fitting: int) -> int:
    """Return how many tokens the engine's cache holds: what the plan says, else what fits, up to some full prompts."""
    if plan.cache_tokens is not None:
        return plan.cache_tokens
    if model.device.type == "cuda":
        fitting = torch.cuda.mem_get_info(model.device)[0] // 2 // _bytes_per_token(model)
    most = PROMPTS_AT_ONCE * (getattr(text_config(model), "max_position_embeddings", None) or 4096)
    return int(max(plan.page_tokens, min(fitting, most)))


def _bytes_per_token(model: nn.Module) -> int:
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def _disk_share(location: str | None, tenants: int) -> int | None:
    """Return the bytes that each of several tenants may hold on disk, so that none evicts the chunks of others."""
    if tenants < 2:
        return None
    with ChunkStore.open(location, memory_bytes=0) as store:
        sizes = [size for tier, size in store.stats()["capacity_bytes"].items() if size and tier != "memory"]
    return min(sizes) // tenants if sizes else None
