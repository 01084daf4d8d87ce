# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A blended prefill of a hybrid model beside a stock one, and beside what the parts of the stock one allow.

    bound = products · share of their FLOPs + attention · share of its FLOPs + scan

All three times are taken inside the stock prefill of the same round. The scan is what a mixer does between its
projections: convolution, recurrence, gates and norms, which run over all tokens in both. The attention is the call of
the attention kernel. The products are all the rest: projections, MLP, norms, embedding. The shares are those that the
blend is charged for, with layer 0 in full and with the check layer as far as its projections.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, suggest
from hf_blend.evaluation.bench.shapes import text_config, timed_model, wait_for
from hf_blend.hybrids.mixer_probe import mixers_of
from hf_blend.prefill.report import BlendReport
from hf_blend.store.chunk import ChunkKey

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
STORED = ("keys_values", "projections")


@dataclass(frozen=True)
class HybridsPlan:
    """What is measured."""

    shapes: tuple[str, ...] = ("lfm2-350m", "qwen3.5-12-layers")
    chunks: int = 8
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratio: float = BlendConfig.recompute_ratio
    selector: str = "kv-deviation"
    rounds: int = 5
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    clock: str = "wall"


@torch.no_grad()
def measure_hybrids(plan: HybridsPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Time stock and blended prefills of each shape in turn."""
    rows = [_row(shape, plan, progress or (lambda _: None)) for shape in plan.shapes]
    settings = {name: value for name, value in vars(plan).items() if name != "shapes"}
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **settings, "rows": rows}


def _row(shape: str, plan: HybridsPlan, progress: Callable[[str], None]) -> dict[str, Any]:
    model = timed_model(shape, plan.dtype, plan.device, plan.seed)
    draw = torch.Generator().manual_seed(plan.seed)
    ids = lambda count: torch.randint(3, text_config(model).vocab_size, (count,), generator=draw).tolist()  # noqa: E731
    pieces = {"chunks": [ids(plan.chunk_tokens) for _ in range(plan.chunks)], "question": ids(plan.question_tokens)}
    store = ChunkStore.open("memory://", memory_bytes=64 << 30)
    watch = _Watch(model, plan.clock)
    kept = []
    for number in range(plan.rounds + 1):  # the first round fills the store
        progress(f"{shape}: round {number} of {plan.rounds}")
        cache = BlendCache(model, store, recompute_ratio=plan.ratio, selector=plan.selector)
        inputs = cache.inputs(None, **pieces)
        parts = watch.stock(inputs)
        blend_ms = watch.prefill({**inputs, "past_key_values": cache})
        kept.append({**parts, "blend_ms": blend_ms, "bound_ms": _bound(parts, flop_shares(cache.report))})
    figures, (key,) = _figures(kept[1:]), store.add(model, None, pieces["chunks"][:1])
    sizes = _bytes(model, store, key)
    layers = len(mixers_of(model))
    loaded = plan.chunks * plan.chunk_tokens * sum(sizes[f"{one}_bytes_per_token"] for one in STORED)
    most_ms = figures["stock_ms"] * layers / (layers + 1)  # the loading of one layer is hidden behind nothing
    least = {"least_tier_mb_s": loaded / 1e3 / most_ms}
    return {"shape": shape, **_sizes(model, inputs), **figures, **_costs(cache), **sizes, **least}


class _Watch:
    """Times a model, and parts of it while it runs."""

    def __init__(self, model: nn.Module, clock: str) -> None:
        if clock not in CLOCKS:
            raise ConfigError(f"there is no clock named {clock!r}. {suggest(clock, CLOCKS)}")
        self._model, self._now = model, CLOCKS[clock]
        self._spent: dict[str, float] = {}

    def prefill(self, inputs: Mapping[str, Any]) -> float:
        """Milliseconds of a prefill."""
        started = self._now()
        self._model(**inputs, use_cache=True, logits_to_keep=1)
        wait_for(self._model)
        return 1e3 * (self._now() - started)

    def stock(self, inputs: Mapping[str, Any]) -> dict[str, float]:
        """Milliseconds of a stock prefill, and of its scans and attention."""
        self._spent = dict.fromkeys(("mixer", "projection", "attention"), 0.0)
        attend = nn.functional.scaled_dot_product_attention

        def attention(*args: Any, **given: Any) -> Any:
            with self._part("attention"):
                return attend(*args, **given)

        with self._watching(), patch.object(nn.functional, "scaled_dot_product_attention", attention):
            stock_ms = self.prefill(inputs)
        scan_ms = self._spent["mixer"] - self._spent["projection"]
        return {"stock_ms": stock_ms, "scan_ms": scan_ms, "attention_ms": self._spent["attention"]}

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        wait_for(self._model)
        started = self._now()
        yield
        wait_for(self._model)
        self._spent[name] += 1e3 * (self._now() - started)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Time every mixer, and the linear modules inside it that a blend runs for its rows only."""
        with ExitStack() as hooks:
            for mixer in filter(None, mixers_of(self._model)):
                self._watch(mixer.module, "mixer", hooks)
                for projection in mixer.projections:
                    self._watch(projection.module, "projection", hooks)
            yield

    def _watch(self, module: nn.Module, name: str, hooks: ExitStack) -> None:
        parts: list[Any] = []

        def begins(*_: Any) -> None:
            parts.append(self._part(name))
            parts[-1].__enter__()

        def ends(*_: Any) -> None:
            parts.pop().__exit__(None, None, None)

        hooks.callback(module.register_forward_pre_hook(begins).remove)
        hooks.callback(module.register_forward_hook(ends).remove)


def _bound(parts: dict[str, float], shares: dict[str, float]) -> float:
    """Milliseconds of a blend that costs nothing beside its share of the stock prefill's parts."""
    products = parts["stock_ms"] - parts["scan_ms"] - parts["attention_ms"]
    return products * shares["products"] + parts["attention_ms"] * shares["attention"] + parts["scan_ms"]


def _sizes(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, int]:
    mixers = mixers_of(model)
    return {"layers": len(mixers), "mixers": sum(map(bool, mixers)), "tokens": inputs["input_ids"].shape[1]}


def _figures(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians of times, and of their ratios within a round."""
    median = lambda value: statistics.median(map(value, rounds))  # noqa: E731
    return {
        **{name: median(lambda one, name=name: one[name]) for name in rounds[0]},
        "speedup": median(lambda one: one["stock_ms"] / one["blend_ms"]),
        "bound": median(lambda one: one["stock_ms"] / one["bound_ms"]),
        "share_of_bound": median(lambda one: one["bound_ms"] / one["blend_ms"]),
        "least_share_of_bound": min(one["bound_ms"] / one["blend_ms"] for one in rounds),
    }


def flop_shares(report: BlendReport) -> dict[str, float]:
    """Of what a full prefill spends on products of weights and tokens, and on attention, the shares spent here."""
    full = [0.0, 0.0]
    spent = [0.0, 0.0]
    for work in report._work:
        cost = report._costs[work.layer]
        active = work.real & work.active_columns
        if work.kv_only:
            spent[0] += cost.before_kv * int(active.sum())
            continue
        for into, tokens in ((full, work.real), (spent, active)):
            keys = float((report._columns(work, tokens) + 1).sum())
            into[0] += (cost.before_kv + cost.after_kv) * int(tokens.sum())
            into[1] += cost.per_key * keys
    shares = (one / total if total else 0.0 for one, total in zip(spent, full, strict=True))
    return dict(zip(("products", "attention"), shares, strict=True))


def _costs(cache: BlendCache) -> dict[str, float]:
    report = cache.report
    shares = {f"{name}_share": share for name, share in flop_shares(report).items()}
    return {"charged_budget": report.charged_budget, **shares, "flop_bound": report.flop_bound}


def _bytes(model: nn.Module, store: ChunkStore, key: ChunkKey) -> dict[str, float]:
    """Bytes of a token as stored, and as they would be with every column of the input projections."""
    sizes = dict.fromkeys(STORED, 0)
    chunk = store.get(key)
    for name, tensor in chunk.named_tensors():  # type: ignore[union-attr]
        if name.startswith("layer"):
            sizes["projections" if name.endswith(".p") else "keys_values"] += tensor.nbytes // tensor.shape[1]
    every = sum(mixer.full_width for mixer in filter(None, mixers_of(model)))
    itemsize = next(model.parameters()).element_size()
    found = {f"{name}_bytes_per_token": size for name, size in sizes.items()}
    return {**found, "all_columns_bytes_per_token": every * itemsize}
