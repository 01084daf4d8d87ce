# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this machine does with a model: seconds of a blended prefill by length and ratio, bytes a second of a tier.

Measured once and kept in the assets folder of the Hugging Face cache; a machine, model, dtype or number of threads
that differs is measured again.
"""

import json
import platform
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from torch import nn

from ..cache.blend_cache import BlendCache
from ..config import BlendConfig
from ..model.anatomy import cache_argument, text_config, text_ids
from ..model.identity import fingerprint
from ..store import ChunkStore

LENGTHS = (512, 1536)  # of the measured prompts, in tokens
RATIOS = (0.05, 0.5)
CHUNKS = 4
QUESTION_TOKENS = 32
ROUNDS = 5


@dataclass(frozen=True)
class Point:
    """One measured prefill."""

    tokens: int
    ratio: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """What was measured."""

    machine: dict[str, Any]
    points: tuple[Point, ...]
    bytes_per_token: float

    def prefill_s(self, tokens: int, ratio: float) -> float:
        """Seconds of a blended prefill with its chunks in memory: (a + b r) n + (c + d r) n², fitted to the points."""
        seconds = sum(term * weight for term, weight in zip(_terms(tokens, ratio), self._weights, strict=True))
        return max(0.0, seconds)

    @cached_property
    def _weights(self) -> list[float]:
        """The weights of the terms, kept because a request asks for many ratios."""
        rows = torch.tensor([_terms(point.tokens, point.ratio) for point in self.points], dtype=torch.float64)
        seconds = torch.tensor([[point.seconds] for point in self.points], dtype=torch.float64)
        fitted = torch.linalg.lstsq(rows / seconds, torch.ones_like(seconds))  # to relative errors, not to seconds
        weights: list[float] = fitted.solution[:, 0].tolist()
        return weights


def _terms(tokens: int, ratio: float) -> list[float]:
    scaled = tokens / 1000
    return [scaled, scaled * ratio, scaled**2, scaled**2 * ratio]


def profile_of(
    model: nn.Module,
    config: BlendConfig | None = None,
    *,
    lengths: Sequence[int] | None = None,
    folder: Path | None = None,
) -> Profile:
    """The profile of a model on this machine, measured if it is not known."""
    config = config or BlendConfig()
    lengths = lengths or _lengths(model)
    machine = _machine(model, config, lengths)
    root = cached_assets_path("hf_blend", namespace="profiles") if folder is None else folder
    path = root / f"{machine['model'][:16]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # not there or not readable: measured again
        saved = json.loads(path.read_text("utf-8"))
        if saved["machine"] == machine:
            points = tuple(Point(**point) for point in saved["points"])
            return Profile(machine, points, saved["bytes_per_token"])
    measured = _measured(model, config, lengths, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(asdict(measured)), "utf-8")
    unfinished.replace(path)
    return measured


def bytes_per_second(store: ChunkStore, model: nn.Module, tokens: int = 512) -> float:
    """How fast a store gives back a chunk that it does not hold in memory: read, verified."""
    (key,) = store.add(model, None, [text_ids(model, tokens, 99).tolist()])
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        chunk = store.get(key)
        rates.append(0.0 if chunk is None else chunk.nbytes / (time.perf_counter() - started))
    store.delete(key)
    return statistics.median(rates)


def tier_rates(store: ChunkStore, model: nn.Module, tokens: int = 512) -> dict[str, float]:
    """How fast each tier of a store gives back a chunk: see `bytes_per_second`."""
    rates = {tier.name: bytes_per_second(ChunkStore(None, [tier]), model, tokens) for tier in store.tiers}
    return {name: rate for name, rate in rates.items() if rate > 0}


def _lengths(model: nn.Module) -> tuple[int, ...]:
    """Two lengths that fit the model with a question behind them."""
    positions = getattr(text_config(model), "max_position_embeddings", None) or 1 << 30
    most = positions - 2 * QUESTION_TOKENS
    return tuple(min(length, most * length // LENGTHS[-1]) for length in LENGTHS)


def _measured(model: nn.Module, config: BlendConfig, lengths: Sequence[int], machine: dict[str, Any]) -> Profile:
    store = ChunkStore.open("memory://")
    bytes_per_token = 0.0
    chunks = {}
    for tokens in lengths:
        chunks[tokens] = [text_ids(model, tokens // CHUNKS, seed).tolist() for seed in range(CHUNKS)]
        first_key = store.add(model, None, chunks[tokens])[0]
        chunk = store.get(first_key)
        if chunk is not None:
            bytes_per_token = chunk.nbytes / chunk.tokens
    # In turns: a machine that drifts drifts for all of them
    times: dict[tuple[int, float], list[float]] = {}
    for number in range(ROUNDS + 1):
        for tokens in lengths:
            for ratio in RATIOS:
                cache = BlendCache(model, store, **{**config.to_dict(), "recompute_ratio": ratio})
                seconds = _seconds(model, cache, chunks[tokens])
                if number:  # the first round warms up
                    times.setdefault((tokens, ratio), []).append(seconds)
    points = []
    for (tokens, ratio), measured in times.items():
        points.append(Point(tokens // CHUNKS * CHUNKS, ratio, statistics.median(measured)))
    return Profile(machine, tuple(points), bytes_per_token)


@torch.no_grad()
def _seconds(model: nn.Module, cache: Any, chunks: list[list[int]]) -> float:
    inputs = cache.inputs(None, chunks=chunks, question=text_ids(model, QUESTION_TOKENS, 77).tolist())
    started = time.perf_counter()
    model.generate(**inputs, **cache_argument(model, cache), do_sample=False, max_new_tokens=1)
    return time.perf_counter() - started


def _machine(model: nn.Module, config: BlendConfig, lengths: Sequence[int]) -> dict[str, Any]:
    settings = config.to_dict()
    del settings["recompute_ratio"]
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "model": fingerprint(model),
        "device": name or "cpu",
        "node": platform.node(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lengths": list(lengths),
        "config": settings,
    }
