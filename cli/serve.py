# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Serve a model over HTTP, as OpenAI's API, over stored documents."""

import logging
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_blend.errors import import_extra, suggest

from .calibrating import Calibrate, calibrate_once, say_recipe
from .choosing import open_source
from .options import Device, Dtype, Model, Ratio, Selector, Store, Unverified, Weights
from .output import Json, SecretFile, fail, read_secret, said_if_slow, say, show
from .reading import CHECKING

if TYPE_CHECKING:
    from hf_blend.serving.guard import Guard
    from hf_blend.serving.service import Service
    from hf_blend.serving.tenants import Tenant

__all__ = ["serve"]


def _configured(context: typer.Context, path: Path | None) -> Path | None:
    """Let a file say what the command line and the environment leave out."""
    import json
    import tomllib

    if path is None:
        return None
    try:
        text = path.read_text("utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{str(path)!r} cannot be read ({error}); TOML or JSON is expected") from error
    options = {name.replace("-", "_"): value for name, value in content.items()} if isinstance(content, dict) else {}
    names = {option.name for option in context.command.params} - {"config", "help"}
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{str(path)!r} is a {type(content).__name__}, expected options of this command")
    if odd := sorted(options.keys() - names):
        raise typer.BadParameter(f"{str(path)!r} has {odd[0]!r}. {suggest(odd[0], names)}")
    context.default_map = options
    return path


Config = Annotated[
    Path | None,
    typer.Option(callback=_configured, is_eager=True, help="TOML or JSON file of options, for those not given here."),
]
ServedName = Annotated[str | None, typer.Option(help="Name of the model in requests; else that of --model.")]
ApiKey = Annotated[
    str | None, typer.Option(help="Key that requests bear; better as HF_BLEND_SERVE_API_KEY, which ps does not show.")
]
AccessLog = Annotated[bool, typer.Option(help="Say a line of each request, with its x-request-id, on stderr.")]

Remote = Annotated[str | None, typer.Option(help="URL of a tier behind it that servers share, such as redis://host.")]
Host = Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for all who reach this machine.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is any free one.")]
TenantsFile = Annotated[
    Path | None, typer.Option("--tenants", help="JSON file of tenants: name, api_key, secret of each.")
]
MaxRequests = Annotated[int, typer.Option(min=1, help="Requests under way or waiting; more are answered 429.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Where an answer is cut that names no length.")]
MaxBody = Annotated[int, typer.Option(min=1, help="Bytes of a request; a larger one is answered 413.")]
CacheTokens = Annotated[
    int | None, typer.Option(min=64, help="Tokens in the engine's cache; by default what a quarter of memory holds.")
]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of one step of the engine.")]
StallMs = Annotated[float | None, typer.Option(min=0, help="How long a blend may hold a step up; else as steps take.")]
Heal = Annotated[
    bool | None,
    typer.Option(
        "--heal/--no-heal",
        help="While nobody waits, compute blended conversations in full; by default.",
    ),
]
ByTenant = Annotated[
    bool, typer.Option("--metrics-by-tenant", help="Say in /metrics, which asks for no key, what each tenant stores.")
]
Check = Annotated[bool, typer.Option("--check", help="Start, answer one question over HTTP, and end.")]


def serve(
    model: Model = None,
    served_model_name: ServedName = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    store: Store = None,
    remote: Remote = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    ratio: Ratio = None,
    selector: Selector = None,
    calibrate: Calibrate = False,
    tenants: TenantsFile = None,
    api_key: ApiKey = None,
    secret_file: SecretFile = None,
    max_requests: MaxRequests = 64,
    max_new_tokens: MaxNewTokens = 256,
    max_body_bytes: MaxBody = 4 << 20,
    cache_tokens: CacheTokens = None,
    batch_tokens: BatchTokens = 512,
    stall_ms: StallMs = None,
    heal: Heal = None,
    metrics_by_tenant: ByTenant = False,
    allow_unverified: Unverified = False,
    access_log: AccessLog = True,
    config: Config = None,
    check: Check = False,
    json: Json = False,
) -> None:
    """Serve /v1/chat/completions and /v1/completions; needs the extra serve. Ctrl-C or SIGTERM ends it.

    Each option may also come from the environment, --max-requests as HF_BLEND_SERVE_MAX_REQUESTS, or from --config.

    Examples:
        hf-blend serve --check --port 0 --store my-chunks --json  # slow
        hf-blend serve --model HuggingFaceTB/SmolLM2-135M-Instruct --store my-chunks  # network
    """
    import_extra("starlette", extra="serve", wanted_by="hf-blend serve")
    from hf_blend.evaluation.answering import blend_config
    from hf_blend.serving import refusals, run

    listed = _tenants(tenants, secret_file, api_key)
    blend = blend_config(selector, recompute_ratio=ratio, is_blind=True, allow_unverified=allow_unverified)
    limits = {"requests": max_requests, "new_tokens": max_new_tokens, "body_bytes": max_body_bytes}

    run.check_port(host, port)

    def announce(document: dict[str, Any]) -> None:
        show(document, as_json=json)
        say("Press Ctrl-C to end it.")

    source = open_source(model, device, dtype, weights=weights, check=refusals.check_model)
    name = Path(source.name).resolve().name if Path(source.name).exists() else source.name  # as clients send it
    settings = {"allow_unverified": allow_unverified} | ({} if ratio is None else {"recompute_ratio": ratio})
    plan = {
        "name": served_model_name or name, "location": store, "remote": remote,
        "secret": read_secret(secret_file), "tenants": listed, "cache_tokens": cache_tokens,
        "batch_tokens": batch_tokens, "stall_s": stall_ms and stall_ms / 1e3, "metrics_by_tenant": metrics_by_tenant,
        "heal": heal is not False, "blend": blend if selector else settings,
    }  # fmt: skip
    before = partial(calibrate_once, allow_unverified=allow_unverified) if calibrate else None
    service = _service(source, plan, limits, before)
    say(f"Serving {service.name} in {service.memory}.")
    if selector is None:
        say_recipe(service.engine.store.recipe(service.engine.model, is_blind=True))
    answers: list[dict[str, Any]] = []

    def started(url: str, stop: Callable[[], None]) -> None:
        if check:
            arguments = (url, stop, service.name, listed[0].api_key if listed else "", json, answers)
            threading.Thread(target=_ask, args=arguments, daemon=True).start()
        else:
            announce({"url": url, "model": service.name})

    if access_log and not check:
        _log_requests()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # behind the last answer it ends by the signal: clean to systemd
    run.serve(service, host, port, on_start=started)
    if check and not (answers and answers[0].get("choices")):
        fail(f"the server gave {answers}, expected an answer. Run it with --traceback.")


def _log_requests() -> None:
    logger, handler = logging.getLogger("hf_blend.serving.access"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _tenants(path: Path | None, secret_file: Path | None, api_key: str | None) -> "list[Tenant]":
    from hf_blend.errors import import_extra

    for module in ("starlette", "uvicorn", "prometheus_client"):
        import_extra(module, extra="serve", wanted_by="hf-blend serve")
    from hf_blend.serving.tenants import Tenant, check_key, read_tenants

    if api_key is not None:
        if path is not None:
            raise typer.BadParameter("each tenant has its own key: leave --api-key out")
        return [Tenant(api_key=check_key(api_key, "--api-key"))]
    if path is not None and secret_file is not None:
        raise typer.BadParameter("each tenant has its own secret: leave --secret-file out")
    return read_tenants(path) if path is not None else []


def _service(
    source: Any, plan: dict[str, Any], limits: dict[str, Any], before: Callable[..., None] | None = None
) -> "Service":
    from hf_blend import ChunkStore
    from hf_blend.evaluation.pictures import Eyes
    from hf_blend.serving.heaps import share_heaps
    from hf_blend.serving.run import ServerPlan, make_service
    from hf_blend.serving.wire import Limits

    share_heaps()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    server = ServerPlan(**plan, limits=Limits(**limits))
    processor = source.processor()
    eyes = processor and Eyes(processor, source.config, server.limits)
    model = source.load()
    if before is not None:
        with ChunkStore.open(server.location, secret=server.secret) as opened:
            before(model, source.tokenizer, opened)
    with said_if_slow(CHECKING):
        return make_service(model, source.tokenizer, server, eyes)


def _ask(url: str, stop: Callable[[], None], model: str, key: str, json: bool, answers: list[dict[str, Any]]) -> None:
    """Ask a bundled question over HTTP, and end the server."""
    import json as codec
    import urllib.request

    from hf_blend.evaluation.bundled import handbook_questions

    question = handbook_questions()[0]
    body = {
        "model": model, "temperature": 0, "max_tokens": 8, "documents": question["chunks"],
        "messages": [{"role": "user", "content": question["question"]}],
    }  # fmt: skip
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", codec.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            answers.append(codec.load(response))
        show({"url": url, **answers[0]}, as_json=json)
    finally:
        stop()
