# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of each turn of a conversation: kept cache against full prefill, and what a file costs."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import SequenceCache
from hf_blend.context.session import load_session, save_session
from hf_blend.evaluation.bench.shapes import text_config, timed_model, wait_for


@dataclass(frozen=True)
class SessionPlan:
    """What is measured."""

    shape: str = "smollm2-135m"
    system_tokens: int = 512
    turn_tokens: int = 64
    turns: int = 10
    rounds: int = 5
    dtype: str = "float32"
    seed: int = 0
    device: str = "cpu"


@torch.no_grad()
def measure_session(plan: SessionPlan, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Go through a conversation turn by turn, each turn measured both ways in turn."""
    model = timed_model(plan.shape, plan.dtype, plan.device, plan.seed)
    draw = torch.Generator().manual_seed(plan.seed)
    cache, rows = SequenceCache(model), []
    with cache, tempfile.TemporaryDirectory() as folder:
        model(_ids(model, plan.system_tokens, draw), past_key_values=cache, logits_to_keep=1)
        for turn in range(1, plan.turns + 1):
            if progress:
                progress(f"turn {turn} of {plan.turns}, {cache.get_seq_length()} tokens kept")
            question = _ids(model, plan.turn_tokens, draw)
            rows.append({"turn": turn, **_turn(model, cache, question, Path(folder) / "session", plan.rounds)})
            model(_ids(model, plan.turn_tokens, draw), past_key_values=cache, logits_to_keep=1)  # the answer
    return {"threads": torch.get_num_threads(), **vars(plan), "rows": rows}


def _turn(model: nn.Module, cache: SequenceCache, question: Tensor, path: Path, rounds: int) -> dict[str, Any]:
    """Measure one turn, and leave the question in the cache."""
    before = torch.tensor([cache.tokens()], device=question.device)
    kept, whole = cache.get_seq_length(), torch.cat([before, question], 1)
    save_ms, file_bytes = _timed(lambda: save_session(cache, path))
    loaded = SequenceCache(model)
    load_ms, _ = _timed(lambda: load_session(loaded, path))
    full_ms, kept_ms = [], []
    for _ in range(rounds):
        full_ms.append(_timed(lambda: _waited(model, whole, use_cache=True, logits_to_keep=1))[0])
        kept_ms.append(_timed(lambda: _waited(model, question, past_key_values=cache, logits_to_keep=1))[0])
        cache.crop(-question.shape[1])
    model(question, past_key_values=cache, logits_to_keep=1)
    full, short = statistics.median(full_ms), statistics.median(kept_ms)
    return {
        "prompt_tokens": whole.shape[1],
        "kept_tokens": kept,
        "full_ms": full,
        "kept_ms": short,
        "speedup": full / short,
        "speedup_with_load": full / (short + load_ms),
        "save_ms": save_ms,
        "load_ms": load_ms,
        "file_bytes": file_bytes,
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return 1e3 * (time.perf_counter() - started), result


def _waited(model: nn.Module, ids: Tensor, **arguments: Any) -> None:
    """A forward, until the device is done with it."""
    model(ids, **arguments)
    wait_for(model)


def _ids(model: Any, tokens: int, draw: torch.Generator) -> Tensor:
    return torch.randint(3, text_config(model).vocab_size, (1, tokens), generator=draw).to(model.device)
