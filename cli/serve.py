# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Serve a model to a few people, as OpenAI's API over HTTP."""

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_blend.errors import import_extra

from .options import REAL, Device, Dtype, Model, Ratio, Selector, Store, Unverified, Weights
from .output import Json, said_if_slow, say, show
from .reading import CHECKING

__all__ = ["serve"]


def serve(
    model: Model = REAL,
    served_model_name: Annotated[str | None, typer.Option(help="Its name in requests; else that of --model.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    store: Store = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for all who reach this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is any free one.")] = 8000,
    ratio: Ratio = None,
    selector: Selector = None,
    tenants: Annotated[Path | None, typer.Option(help="JSON file of tenants: name and api_key of each.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Of requests; better as HF_BLEND_SERVE_API_KEY, which ps does not show.")
    ] = None,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that wait behind the one under way.")] = 16,
    max_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens of a prompt and its answer; else as many as the model has.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Where an answer is cut that names no length.")] = 256,
    max_seconds: Annotated[float, typer.Option(min=1, help="Seconds for a request, with its wait.")] = 300,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 1 << 20,
    conversations: Annotated[int, typer.Option(min=0, help="Whose K and V are kept for their next turn.")] = 4,
    heal: Annotated[bool, typer.Option("--heal/--no-heal", help="While nothing waits, make these exact.")] = True,
    chains: Annotated[bool, typer.Option(help="Store what was healed, exact for prompts that begin alike.")] = False,
    edits: Annotated[
        str, typer.Option(help="Of a history that is edited: compute what follows, or blend.")
    ] = "compute",
    allow_unverified: Unverified = False,
    json: Json = False,
) -> None:
    """Serve /v1/chat/completions and /v1/completions, one request after the other; needs the extra serve.

    Ctrl-C or SIGTERM ends it. For many users take vLLM with the connector of hf_blend.

    Examples:
        hf-blend serve --store my-chunks --port 8080 --json  # network
        hf-blend serve --model HuggingFaceTB/SmolLM2-135M-Instruct --store my-chunks  # network
    """
    for module in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
        import_extra(module, extra="serve", needed_by="hf-blend serve")
    from hf_blend import BlendConfig, ChunkStore
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.evaluation.bundled import open_model
    from hf_blend.serving.app import make_app
    from hf_blend.serving.run import bind, make_server, url_of
    from hf_blend.serving.wire import RequestLimits
    from hf_blend.serving.worker import ModelWorker
    from hf_blend.store.memory import available_bytes
    from hf_blend.tenants import Tenant, check_key, read_tenants

    limits = RequestLimits(
        queue=max_queue,
        tokens=max_tokens,
        new_tokens=max_new_tokens,
        request_s=max_seconds,
        body_bytes=max_body_bytes,
        conversations=conversations,
    )
    config: BlendConfig | None = None
    settings: dict[str, Any] = {"allow_unverified": allow_unverified, "edits": edits, "chains": chains}
    if selector is not None:
        config = blend_config(selector, recompute_ratio=ratio)
    elif ratio is not None:
        settings["recompute_ratio"] = ratio
    if tenants is not None and api_key is not None:
        raise typer.BadParameter("each tenant has its own key: leave --api-key out")
    listed = [Tenant()]
    if tenants is not None:
        listed = read_tenants(tenants)
    elif api_key is not None:
        listed = [Tenant(api_key=check_key(api_key, "--api-key"))]
    listener = bind(host, port)  # before the weights are read
    source = open_model(model, device, dtype, weights)
    name = served_model_name or (Path(source.name).resolve().name if Path(source.name).exists() else source.name)
    memory_bytes = available_bytes() // 4 // len(listed)
    stores = {}
    for tenant in listed:
        stores[tenant.name] = ChunkStore.open(store, namespace=tenant.name, memory_bytes=memory_bytes)
    with said_if_slow(CHECKING):
        worker = ModelWorker(source.load(), source.tokenizer, stores, limits, config, heal=heal, **settings)
    app = make_app(worker, name, listed, limits)
    show({"url": url_of(listener), "model": name}, as_json=json)
    say("Press Ctrl-C to end it.")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # behind the last answer it ends by the signal: clean to systemd
    make_server(app, log_requests=True).run(sockets=[listener])
