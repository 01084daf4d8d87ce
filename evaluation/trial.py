# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A run: tasks, models, methods and ratios; one line for each answer.

Every sample is answered by all methods, full prefill first, before the next one begins: what is measured side by side
is measured under the same conditions, and a stopped run has whole comparisons. Before that, every chunk is computed
once, and each method keeps what it would have kept, so that none pays for it. With a batch, samples are answered side
by side and the first `TIMED` also alone, by all methods in turn, for the time to the first token.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hf_blend
from hf_blend import ChunkStore, plugins
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError

from .answering import divergence
from .blending import make_method, variants
from .bundled import REAL, load_model
from .folder import RunFolder, place_of
from .methods.base import EvalMethod, Outcome
from .scores.base import Score
from .tasks.base import Sample, Shape, Task

FULL = "full-prefill"
WARM = "full-reuse"
TIMED = 10  # samples that are answered alone too, where others are answered side by side
ADDED = {"partial", "times_batches"}  # settings that runs without them did not note


@dataclass(frozen=True)
class EvalConfig:
    """What is asked of whom."""

    tasks: tuple[str, ...] = ("needle",)
    models: tuple[str, ...] = (REAL,)
    methods: tuple[str, ...] = (FULL, "prefix-caching", "full-reuse", BlendConfig.selector)
    ratios: tuple[float, ...] = (0.02, 0.05, 0.1, 0.15, 0.3)
    limit: int | None = 50
    seed: int = 1
    chunk_tokens: int | None = None
    chunk_order: str = "given"
    data: tuple[tuple[str, str], ...] = ()
    batch: int = 1
    dtype: str | None = None
    device: str = "cpu"
    most_chunks: int | None = None
    partial: float | None = None
    times_batches: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot run, before anything is loaded."""
        for task in self.tasks:
            plugins.load("evaluation.tasks", task)
        self.variants()
        for task, path in self.data:
            if task not in self.tasks:
                raise ConfigError(f"data is given for {task!r}, which is not asked for: {', '.join(self.tasks)}.")
            if not Path(path).is_file():
                raise ConfigError(f"the data {path!r} of {task} is no file. Give a JSONL file.")
        if any(not 0 <= ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"ratios are {self.ratios}, expected numbers from 0 to 1.")
        if self.batch < 1 or (self.limit is not None and self.limit < 1):
            raise ConfigError(f"limit is {self.limit} and batch {self.batch}, expected 1 or more.")
        self.shape()

    def open_store(self) -> ChunkStore:
        """Open the store that a task's chunks are kept in."""
        return ChunkStore.open("memory://", partial=self.partial)

    def shape(self) -> Shape:
        """How chunks are cut and ordered."""
        return Shape(self.chunk_tokens, self.chunk_order, self.seed, self.most_chunks)

    @property
    def settings(self) -> dict[str, Any]:
        """What must be the same for two runs to be one."""
        versions = {"hf_blend": hf_blend.__version__, "torch": torch.__version__}
        settings = {name: value for name, value in asdict(self).items() if name not in ADDED or value}
        record = {**settings, "threads": torch.get_num_threads(), "versions": versions}
        named = (*self.tasks, *(name.partition(":")[0] for name, _ in self.variants()))
        paths = [name for name in named if name.endswith(plugins.FILE)]
        digests = {path: hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16] for path in paths}
        return {**record, "files": digests} if digests else record

    def variants(self) -> list[tuple[str, float | None]]:
        """Every method with every ratio that it takes, full prefill first."""
        names = (FULL, *self.methods)
        return list(dict.fromkeys(variant for name in names for variant in variants(name, self.ratios)))


def run(
    config: EvalConfig,
    folder: RunFolder,
    progress: Callable[[Iterator[Any], int], Any] | None = None,
    load: Callable[[str, str, str], tuple[nn.Module, Any]] = load_model,
) -> None:
    """Answer all that the folder has no answer to."""
    for name in config.models:
        if _is_complete(config, name, folder):
            continue
        model, tokenizer = load(name, config.device, config.dtype or "auto")
        for task_name in config.tasks:
            task = load_task(config, task_name, tokenizer)
            samples = task.samples(config.limit, config.shape())
            bench = _Bench(config, (task_name, name), task, model, tokenizer, folder)
            parts = [samples[first : first + config.batch] for first in range(0, len(samples), config.batch)]
            for batch in progress(iter(parts), len(parts)) if progress else parts:
                bench.answer(batch)


def _is_complete(config: EvalConfig, model: str, folder: RunFolder) -> bool:
    """Whether nothing is left to answer, known without loading the model; only where the number is known."""
    if config.limit is None:
        return False
    expected = config.limit * len(config.variants())
    counts = [sum(place[:2] == (task, model) for place in folder.lines) for task in config.tasks]
    return all(count >= expected for count in counts)


def load_task(config: EvalConfig, name: str, tokenizer: Any) -> Task:
    """Return a task of a run."""
    data = dict(config.data).get(name)
    made: Task = plugins.load("evaluation.tasks", name)(tokenizer, Path(data) if data else None, config.seed)
    return made


class _Bench:
    def __init__(
        self,
        config: EvalConfig,
        names: tuple[str, str],
        task: Task,
        model: nn.Module,
        tokenizer: Any,
        folder: RunFolder,
    ) -> None:
        self._config, self._names, self._folder = config, names, folder
        store = config.open_store()
        setting = (model, tokenizer, store, task.max_new_tokens)
        self._variants: list[tuple[str, float | None, EvalMethod]] = [
            (name, ratio, make_method(name, ratio, *setting)) for name, ratio in config.variants()
        ]
        self._warm = make_method(WARM, None, model, tokenizer, store, 1)
        rules = dict.fromkeys((task.score, *task.also))
        self._rules: dict[str, Score] = {name: plugins.load("evaluation.scores", name)(tokenizer) for name in rules}
        self._score, self._done = task.score, 0

    def answer(self, samples: Sequence[Sample]) -> None:
        """Answer some samples by every method that has not answered them yet."""
        stored = self._folder.lines
        missing = [
            sample
            for sample in samples
            if any((*self._names, *variant[:2], sample.id) not in stored for variant in self._variants)
        ]
        is_timed_alone = len(missing) > 1 and not self._config.times_batches
        alone = {sample.id for sample in samples[: max(0, TIMED - self._done)] if is_timed_alone}
        self._done += len(samples)
        if not missing:
            return
        counted = self._warm.answer(missing)
        for *_, method in self._variants:
            method.warm(missing)
        full = self._variants[0][2].answer(missing)
        full_ids = [outcome.ids for outcome in full]
        lines = []
        for name, ratio, method in self._variants:
            outcomes = self._answered(method, missing, full_ids)
            # a method that answers samples alone did so just now, and knows the beginning that it keeps
            timed = alone if method.answers_together else ()
            times = [method.answer([sample])[0].ttft_ms if sample.id in timed else None for sample in missing]
            if name == FULL:
                full = outcomes
            for sample, outcome, right, time_ms, warm in zip(missing, outcomes, full, times, counted, strict=True):
                lines.append(self._line(name, ratio, sample, outcome, right, time_ms, warm))
        self._folder.add([line for line in lines if place_of(line) not in self._folder.lines])

    @staticmethod
    def _answered(method: EvalMethod, samples: Sequence[Sample], targets: list[tuple[int, ...]]) -> list[Outcome]:
        if method.answers_together:
            return method.answer(samples, targets)
        return [method.answer([sample], [ids])[0] for sample, ids in zip(samples, targets, strict=True)]

    def _line(
        self,
        name: str,
        ratio: float | None,
        sample: Sample,
        outcome: Outcome,
        full: Outcome,
        time_ms: Any,
        warm: Outcome,
    ) -> dict[str, Any]:
        scores = {rule: score.best(outcome.text, sample.answers) for rule, score in self._rules.items()}
        kl, top1 = agreement(outcome.logits, full.logits)
        own_ms = outcome.batch_ttft_ms if self._config.times_batches else outcome.ttft_ms
        return {
            "task": self._names[0],
            "model": self._names[1],
            "method": name,
            "ratio": ratio,
            "id": sample.id,
            "prediction": outcome.text,
            "answers": list(sample.answers),
            "score": scores[self._score],
            "scores": scores,
            "ttft_ms": own_ms if time_ms is None else time_ms,
            "charged_budget": outcome.charged_budget,
            "prompt_tokens": outcome.prompt_tokens,
            "reused_tokens": outcome.reused_tokens,
            "read_bytes": outcome.read_bytes,
            "computed_chunks": warm.computed_chunks,
            "kl": kl,
            "top1": top1,
            "exact_output": outcome.ids == full.ids,
        }


def agreement(logits: Tensor | None, full: Tensor | None) -> tuple[float | None, float | None]:
    """How near a method is to a full prefill over the full prefill's answer.

    Shapes: logits `[tokens, vocabulary]`.
    """
    if logits is None or full is None or logits.shape != full.shape or not len(full):
        return None, None
    kl, is_same = divergence(logits, full), full.argmax(-1) == logits.argmax(-1)
    return float(kl.mean()), float(is_same.float().mean())
