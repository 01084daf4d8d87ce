# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a blended prefill costs the host: kernels, synchronisations and host time beside a stock prefill.

On a GPU the host only launches kernels. A prefill whose layers launch many small ones, or that waits for the device to
learn how many tokens were chosen, is as slow as its host, whatever share of the arithmetic it saves. Counts do not
depend on the machine; the time is that of a model so small that arithmetic does not hide the host.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_blend import BlendCache, BlendConfig, ChunkStore, observer
from hf_blend.evaluation.answering import ids_of
from hf_blend.evaluation.bench.shapes import random_pieces, text_config, timed_model, wait_for
from hf_blend.model import attention
from hf_blend.prefill.report import BlendReport

WAITING = (
    *("tolist", "item", "cpu", "nonzero", "equal", "unique"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::_local_scalar_dense")


@dataclass(frozen=True)
class OverheadPlan:
    """What is measured."""

    shape: str = "tiny-deep"
    tokens: int = 960
    short_tokens: int = 128
    question_tokens: int = 32
    chunks: tuple[int, ...] = (2, 6, 20, 64)
    settings: tuple[tuple[str, float], ...] = ((BlendConfig.selector, 0.15), ("kv-deviation", 0.15))
    rounds: int = 15
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


class KernelCount:
    """Counts the ATen calls that launch work, and the requests of the host for a result that it has to wait for.

    A request for what is in host memory already counts too: on a CPU there is no telling them apart. `numpy` is none:
    on a GPU it raises, so that `cpu` stands before it.
    """

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Iterator["KernelCount"]:
        """Count what runs inside."""
        kernels = self.kernels
        syncs = self.syncs

        class Dispatched(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if not func.is_view and not func._schema.name.startswith(NO_KERNEL):
                    kernels[func._schema.name] += 1
                return func(*args, **(kwargs or {}))

        class Called(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__name__", "") in WAITING:
                    syncs[func.__name__] += 1
                return func(*args, **(kwargs or {}))

        with observer(Dispatched()), observer(Called()):
            yield self


def measure_overhead(plan: OverheadPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Count and time prefills of the same prompt, stock and blended, with all chunks in memory."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    rows = []
    for selector, ratio in plan.settings:
        for chunks in plan.chunks:
            if progress:
                progress(f"{selector} at {ratio}, {chunks} chunks")
            rows.append(_row(model, plan, selector, ratio, chunks))
    return {"threads": torch.get_num_threads(), "torch": torch.__version__, **vars(plan), "rows": rows}


def _row(model: nn.Module, plan: OverheadPlan, selector: str, ratio: float, chunks: int) -> dict[str, Any]:
    blend, stock, report = _runs(model, plan, (selector, ratio), chunks, plan.tokens)
    layers = text_config(model).num_hidden_layers
    ours = count(blend)
    plain = count(stock)
    return {
        "selector": selector,
        "ratio": ratio,
        "chunks": chunks,
        "tokens": report.prompt_tokens,
        "layers": layers,
        "kernels_per_layer": sum(ours.kernels.values()) / layers,
        "stock_kernels_per_layer": sum(plain.kernels.values()) / layers,
        "syncs": sum(ours.syncs.values()),
        "stock_syncs": sum(plain.syncs.values()),
        "host_ratio": host_ratio(*_runs(model, plan, (selector, ratio), chunks, plan.short_tokens)[:2], plan.rounds),
        "charged_budget": report.charged_budget,
    }


def _runs(
    model: nn.Module, plan: OverheadPlan, setting: tuple[str, float], chunks: int, tokens: int
) -> tuple[Callable[[], Any], Callable[[], Any], BlendReport]:
    """A blended and a stock prefill of one prompt, and the report of the first, which computed the chunks."""
    pieces = random_pieces(model, chunks, max(1, tokens // chunks), plan.question_tokens, plan.seed)
    stock = {"input_ids": torch.tensor([ids_of(None, pieces)], device=plan.device)}
    store = ChunkStore.open("memory://", memory_bytes=8 << 30)

    def blend() -> BlendCache:
        cache = BlendCache(model, store, selector=setting[0], recompute_ratio=setting[1])
        inputs = cache.inputs(None, **pieces)
        cache.state.question_ids = tuple(pieces["question"])  # there is no tokenizer to write the usual one
        first_token(model, cache, inputs)
        return cache

    return blend, lambda: first_token(model, None, stock), blend().report


@torch.no_grad()
def count(run: Callable[[], Any]) -> KernelCount:
    """Count the calls of a run, with attention as it is on a GPU: a CPU cuts few rows into blocks that see less."""
    counted = KernelCount()
    as_on_a_gpu = {name: (getattr(attention, name)[1],) * 2 for name in ("SMALL_MASK", "BLOCK_ROWS")}
    with patch.multiple(attention, **as_on_a_gpu), counted.counting():
        run()
    return counted


def first_token(model: Any, cache: Any, inputs: Mapping[str, Any]) -> None:
    """Generate one token, and wait for it."""
    model.generate(**inputs, past_key_values=cache, max_new_tokens=1, min_new_tokens=1, do_sample=False)
    wait_for(model)


def host_ratio(ours: Callable[[], Any], stock: Callable[[], Any], rounds: int) -> float:
    """Median over rounds of the processor time of one run over that of the other, in turns, on one thread.

    Processor time is that of the calling thread: what other programs do meanwhile is not counted.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run in (ours, stock):  # what is found out once is found out here
            run()
        return statistics.median(_seconds(ours) / _seconds(stock) for _ in range(rounds))
    finally:
        torch.set_num_threads(threads)


def _seconds(run: Callable[[], Any]) -> float:
    started = time.thread_time()
    run()
    return time.thread_time() - started
