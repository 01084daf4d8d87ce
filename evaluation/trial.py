# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A run: tasks, models, methods and ratios; one line for each answer.

Every sample is answered by all methods, full prefill first, before the next one begins: what is measured side by side
is measured under the same conditions, and a stopped run has whole comparisons. Before that, every chunk is computed
once, and each method keeps what it would have kept, so that none pays for it. With a batch, samples are answered side
by side, and the time to the first token is that of the batch.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
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
from .folder import RunFolder, key_of
from .methods.base import EvalMethod, Outcome
from .scores.base import Score
from .tasks.base import Sample, Shape, Task

FULL = "full-prefill"
WARM = "full-reuse"


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
        files = {}
        for name in (*self.tasks, *(method for method, _ in self.variants())):
            path = name.partition(":")[0]
            if path.endswith(plugins.FILE):
                files[path] = hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:16]
        return {
            **asdict(self),
            "threads": torch.get_num_threads(),
            "versions": {"hf_blend": hf_blend.__version__, "torch": torch.__version__},
            "files": files,
        }

    def variants(self) -> list[tuple[str, float | None]]:
        """Every method with every ratio that it takes, full prefill first."""
        listed: dict[tuple[str, float | None], None] = {}
        for name in (FULL, *self.methods):
            listed |= dict.fromkeys(variants(name, self.ratios))
        return list(listed)


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
            bench = _Bench(config, task_name, name, task, model, tokenizer, folder)
            parts = [samples[first : first + config.batch] for first in range(0, len(samples), config.batch)]
            for batch in progress(iter(parts), len(parts)) if progress else parts:
                bench.answer(batch)


def _is_complete(config: EvalConfig, model: str, folder: RunFolder) -> bool:
    """Whether nothing is left to answer, known without loading the model; only where the number is known."""
    if config.limit is None:
        return False
    expected = config.limit * len(config.variants())
    answered = Counter(key[:2] for key in folder.lines)
    return all(answered[task, model] >= expected for task in config.tasks)


def load_task(config: EvalConfig, name: str, tokenizer: Any) -> Task:
    """Return a task of a run."""
    data = dict(config.data).get(name)
    task: Task = plugins.load("evaluation.tasks", name)(tokenizer, Path(data) if data else None, config.seed)
    return task


class _Bench:
    def __init__(
        self,
        config: EvalConfig,
        task_name: str,
        model_name: str,
        task: Task,
        model: nn.Module,
        tokenizer: Any,
        folder: RunFolder,
    ) -> None:
        self._names = (task_name, model_name)
        self._folder = folder
        store = config.open_store()
        self._methods: dict[tuple[str, float | None], EvalMethod] = {}
        for name, ratio in config.variants():
            self._methods[name, ratio] = make_method(name, ratio, model, tokenizer, store, task.max_new_tokens)
        self._warm = make_method(WARM, None, model, tokenizer, store, 1)
        self._score = task.score
        self._rules: dict[str, Score] = {}
        for rule in (task.score, *task.also):
            self._rules[rule] = plugins.load("evaluation.scores", rule)(tokenizer)

    def answer(self, samples: Sequence[Sample]) -> None:
        """Answer some samples by every method that has not answered them yet."""
        missing = []
        for sample in samples:
            if any((*self._names, *variant, sample.id) not in self._folder.lines for variant in self._methods):
                missing.append(sample)
        if not missing:
            return

        # Compute every chunk, and let each method keep what it would have kept
        warmed = self._warm.answer(missing)
        for method in self._methods.values():
            method.warm(missing)
        first = self._methods[FULL, None].answer(missing)

        # Answer by all methods, in turn, and run full prefill's answer through each
        targets = [outcome.ids for outcome in first]
        full: list[Outcome] = []
        lines = []
        for (name, ratio), method in self._methods.items():
            if method.answers_together:
                outcomes = method.answer(missing, targets)
            else:
                outcomes = []
                for sample, ids in zip(missing, targets, strict=True):
                    outcomes += method.answer([sample], [ids])
                if len(missing) > 1:  # beside times of a batch these would mean something else
                    outcomes = [replace(outcome, ttft_ms=None) for outcome in outcomes]
            full = full or outcomes
            for sample, outcome, right, warm in zip(missing, outcomes, full, warmed, strict=True):
                line = self._line(name, ratio, sample, outcome, right, warm)
                if key_of(line) not in self._folder.lines:
                    lines.append(line)
        self._folder.add(lines)

    def _line(
        self, name: str, ratio: float | None, sample: Sample, outcome: Outcome, full: Outcome, warm: Outcome
    ) -> dict[str, Any]:
        scores = {rule: score.best(outcome.text, sample.answers) for rule, score in self._rules.items()}
        kl, top1 = agreement(outcome.logits, full.logits)
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
            "ttft_ms": outcome.ttft_ms,
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
    """How near a method is to a full prefill over the full prefill's answer: KL divergence, share of equal top tokens.

    Shapes: logits `[tokens, vocabulary]`.
    """
    if logits is None or full is None or logits.shape != full.shape or not len(full):
        return None, None
    is_same = full.argmax(-1) == logits.argmax(-1)
    return float(divergence(logits, full).mean()), float(is_same.float().mean())
