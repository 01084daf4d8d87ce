# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A server under load: full prefill, sharing of prefixes alone, and blending, on the same requests in one run.

Requests arrive at random (Poisson); their chunks are drawn from a library in which a few are asked for often (Zipf).
First each way answers all requests at once: that is its capacity. Then they come at shares of the capacity of full
prefill, the same for all ways. All ways run transformers' continuous batching with the same settings. Beside it, some
requests are answered one after the other: from these service times `replay` says what other machines would do, and how
far off it is on this one.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from hf_blend import ChunkStore
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bench.shapes import text_config, timed_model
from hf_blend.evaluation.bench.ttft import TtftPlan, machine

from .replay import Replayed, Service, replay

FULL, PREFIX, BLEND = "full", "prefix", "blend"
WAYS = (FULL, PREFIX, BLEND)
PATIENCE_S = 3600.0
LONE = 3  # requests that are answered one after the other


@dataclass(frozen=True)
class ServePlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 64
    library: int = 40
    zipf: float = 1.1
    requests: int = 24
    new_tokens: int = 16
    rates: tuple[float, ...] = (0.5, 0.8, 2.5)
    recompute_ratio: float = 0.15
    batch_tokens: int = 512
    batch_requests: int = 8
    page_tokens: int = 64
    cache_tokens: int | None = None
    stall_ms: float = 50.0
    machines: tuple[tuple[int, float, float], ...] = ((1, 1.0, 1.0), (4, 1.0, 1.0), (1, 100.0, 20.0))
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt, BOS included."""
        return 1 + self.chunks * self.chunk_tokens + self.question_tokens


def measure_serve(plan: ServePlan, progress: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Measure every way at once, and at every rate."""
    if plan.library < plan.chunks or plan.requests < 2:
        raise ConfigError(
            f"there are {plan.library} chunks for {plan.chunks} in a prompt, and {plan.requests} requests; expected "
            "are at least as many chunks, and 2 requests. Raise --library or --requests."
        )
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    library, prompts = _prompts(plan, text_config(model).vocab_size)
    with ChunkStore.open("memory://", memory_bytes=64 << 30) as store:
        started = time.perf_counter()
        store.add(model, None, library)
        filled_s = time.perf_counter() - started
        say = progress or (lambda text: None)
        rows, services = list[dict[str, Any]](), dict[str, Service]()
        crowded_s = _crowded_s(model, store, plan, prompts[0])
        for way in WAYS:
            say(f"{way}: {LONE} requests one after the other")
            services[way] = _service(model, store, plan, way, prompts, crowded_s)
        for way in WAYS:
            say(f"{way}: {plan.requests} requests at once")
            row = _measured(model, store, plan, way, prompts, [0.0] * plan.requests)
            rows.append(_compared(plan, services[way], {"way": way, "share": None, "rate": None, **row}))
        most = rows[0]["requests_s"]
        for share in plan.rates:
            arrivals = _arrivals(plan, share * most)
            for way in WAYS:
                say(f"{way}: {share:g} of the capacity of full prefill")
                row = _measured(model, store, plan, way, prompts, arrivals)
                row = {"way": way, "share": share, "rate": share * most, **row}
                rows.append(_compared(plan, services[way], row))
    return {
        "machine": _machine(plan), "plan": asdict(plan), "precompute_s": filled_s, "rows": rows,
        "services": [{"way": way, **asdict(service)} for way, service in services.items()],
        "predicted": _predicted(plan, services),
    }  # fmt: skip


def _machine(plan: ServePlan) -> dict[str, Any]:
    found = machine(TtftPlan(plan.shape, dtype=plan.dtype, device=plan.device))
    return {name: value for name, value in found.items() if name not in ("rounds", "selector")}


def _prompts(plan: ServePlan, vocabulary: int) -> tuple[list[list[int]], list[list[int]]]:
    """The library, and the prompt of each request."""
    draw = random.Random(plan.seed)
    tokens = lambda count: [draw.randrange(3, vocabulary) for _ in range(count)]  # noqa: E731
    library = [tokens(plan.chunk_tokens) for _ in range(plan.library)]
    weights = [1 / (rank + 1) ** plan.zipf for rank in range(plan.library)]
    prompts = []
    for _ in range(plan.requests):
        picked: list[int] = []
        while len(picked) < plan.chunks:
            one = draw.choices(range(plan.library), weights)[0]
            picked += [one] if one not in picked else []
        chunks = [token for number in picked for token in library[number]]
        prompts.append([1, *chunks, *tokens(plan.question_tokens)])
    return library, prompts


def _arrivals(plan: ServePlan, rate: float) -> list[float]:
    """When each request comes, in seconds: the same pattern at every rate."""
    draw, at, found = random.Random(plan.seed + 1), 0.0, []
    for _ in range(plan.requests):
        found.append(at)
        at += draw.expovariate(1.0) / rate
    return found


def _engine(model: nn.Module, store: ChunkStore, plan: ServePlan, way: str) -> Any:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from hf_blend.serving.engine import BlendedBatching, ContinuousBatchingManager

    room = plan.cache_tokens or (plan.batch_requests + 4) * (plan.prompt_tokens + plan.new_tokens)
    batching = ContinuousBatchingConfig(
        page_size=plan.page_tokens,
        num_blocks=-(-room // plan.page_tokens) + 2 * plan.batch_requests,
        max_batch_tokens=plan.batch_tokens,
        max_requests_per_batch=plan.batch_requests,
        allow_block_sharing=way != FULL,
    )
    greedy = GenerationConfig(max_new_tokens=plan.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if way != BLEND:
        return ContinuousBatchingManager(model, greedy, batching)
    return BlendedBatching(
        model, store, generation_config=greedy, batching=batching, stall_s=plan.stall_ms / 1e3,
        recompute_ratio=plan.recompute_ratio,
    )  # fmt: skip


def _measured(
    model: nn.Module, store: ChunkStore, plan: ServePlan, way: str, prompts: Sequence[list[int]], at: Sequence[float]
) -> dict[str, Any]:
    """Answer all requests, each when it comes."""
    engine = _engine(model, store, plan, way)
    engine.start()
    try:
        _finished(engine, [engine.add_request([1, 5, 6, 7], "warm-up", max_new_tokens=2)])
        begin, due = time.perf_counter(), {}
        for number, (prompt, seconds) in enumerate(zip(prompts, at, strict=True)):
            time.sleep(max(0.0, begin + seconds - time.perf_counter()))
            due[engine.add_request(prompt, str(number), record_timestamps=True)] = begin + seconds
        found = _finished(engine, list(due))
        reports = [engine.outcome(name).report for name in due] if way == BLEND else []
    finally:
        engine.stop(block=True)
        engine.destroy()
    return _row(due, found, [report for report in reports if report is not None])


def _crowded_s(model: nn.Module, store: ChunkStore, plan: ServePlan, prompt: list[int]) -> float:
    """Of a step in which as many requests decode as may: their prompts are one, whose blocks are shared."""
    engine = _engine(model, store, plan, PREFIX)
    engine.start()
    try:
        _finished(engine, [engine.add_request(prompt, "first", max_new_tokens=2)])
        names = [
            engine.add_request(prompt, str(number), record_timestamps=True) for number in range(plan.batch_requests)
        ]
        found = _finished(engine, names)
    finally:
        engine.stop(block=True)
        engine.destroy()
    return statistics.median(after - before for one in found.values() for before, after in pairwise(one.timestamps))


def _service(
    model: nn.Module, store: ChunkStore, plan: ServePlan, way: str, prompts: Sequence[list[int]], crowded_s: float
) -> Service:
    """Of requests that are answered one after the other."""
    engine, first, steps = _engine(model, store, plan, way), list[float](), list[float]()
    engine.start()
    try:
        _finished(engine, [engine.add_request([1, 5, 6, 7], "warm-up", max_new_tokens=2)])
        for number, prompt in enumerate(prompts[:LONE]):
            began = time.perf_counter()
            name = engine.add_request(prompt, str(number), record_timestamps=True)
            times = _finished(engine, [name])[name].timestamps
            first.append(times[0] - began)
            steps += [after - before for before, after in pairwise(times)]
    finally:
        engine.stop(block=True)
        engine.destroy()
    token_s = statistics.median(steps)
    prefill_s = max(0.0, statistics.median(first) - token_s)
    slice_s = plan.stall_ms / 1e3 if way == BLEND else prefill_s * plan.batch_tokens / plan.prompt_tokens
    return Service((prefill_s,) * plan.requests, slice_s, token_s, crowded_s, plan.batch_requests)


def _compared(plan: ServePlan, service: Service, row: dict[str, Any]) -> dict[str, Any]:
    """A measured row with how far off its replay is, as a share of what was measured."""
    found = _row_of(replay(service, _arrivals(plan, row["rate"] or math.inf), plan.new_tokens))
    names = ("requests_s", "first_token_p50_s", "first_token_p95_s", "next_token_p50_s")
    return row | {f"replayed_{name}": found[name] / row[name] - 1 for name in names}


def _predicted(plan: ServePlan, services: dict[str, Service]) -> list[dict[str, Any]]:
    """The rows on other machines, at shares of their own capacity of full prefill."""
    rows = []
    for servers, prefill, decode in plan.machines:
        faster = {way: service.faster(prefill, decode) for way, service in services.items()}
        most = _row_of(replay(faster[FULL], [0.0] * plan.requests, plan.new_tokens, servers))["requests_s"]
        for share in plan.rates:
            for way in WAYS:
                found = replay(faster[way], _arrivals(plan, share * most), plan.new_tokens, servers)
                about = {"servers": servers, "prefill": prefill, "decode": decode, "way": way, "share": share}
                rows.append({**about, "rate": share * most, **_row_of(found)})
    return rows


def _row_of(found: Replayed) -> dict[str, Any]:
    row = {"requests_s": len(found.first_token_s) / found.took_s, "took_s": found.took_s}
    row |= {f"first_token_{name}_s": value for name, value in _percentiles(found.first_token_s).items()}
    return row | {f"next_token_{name}_s": value for name, value in _percentiles(found.next_token_s).items()}


def _finished(engine: Any, names: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while len(found) < len(names):
        output = engine.get_result(timeout=PATIENCE_S)
        if output is None or output.error:
            raise ConfigError(f"the engine ended with {getattr(output, 'error', None)!r}, expected answers. Ask less.")
        if output.is_finished():
            found[output.request_id] = output
    return found


def _row(due: dict[str, float], found: dict[str, Any], reports: Sequence[Any]) -> dict[str, Any]:
    times = {name: found[name].timestamps for name in due}
    first = [times[name][0] - at for name, at in due.items()]
    between = [after - before for row in times.values() for before, after in pairwise(row)]
    took = max(row[-1] for row in times.values()) - min(due.values())
    answered = sum(len(row) for row in times.values())
    row = {"requests_s": len(due) / took, "tokens_s": answered / took, "took_s": took}
    row |= {f"first_token_{name}_s": value for name, value in _percentiles(first).items()}
    row |= {f"next_token_{name}_s": value for name, value in _percentiles(between).items()}
    if reports:
        row["charged_budget"] = statistics.fmean(report.charged_budget for report in reports)
        row["blended_requests"] = len(reports)
    return row


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """The smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 95, 99)}
