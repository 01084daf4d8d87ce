# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The smallest recompute ratio that keeps a wanted share of full-prefill quality, for a model and a sample of prompts.

Quality is exact match where answers are known, as on the bundled task, and otherwise how often the first token of the
answer is that of a full prefill, with the KL divergence beside it.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.prompt.pieces import build

from . import chains
from .answering import FULL_PREFILL, Method, answer, is_right
from .bootstrap import interval
from .world.sampling import pieces_of, sample_examples

RATIOS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
NAMES = ("prefix", "chunks", "question")


@dataclass(frozen=True)
class Prompt:
    """One prompt of the sample.

    Attributes:
        pieces: `prefix`, `chunks` and `question`, as `BlendCache.inputs` takes them.
        wanted: the right answer, if it is known.
    """

    pieces: dict[str, Any]
    wanted: str | None = None


@dataclass(frozen=True)
class Point:
    """What one ratio keeps.

    Attributes:
        recompute_ratio: nominal, 0–1.
        kept: quality over that of a full prefill.
        low: lower end of the 95 % bootstrap interval of `kept`.
        high: upper end.
        charged_budget: mean over the prompts.
        kl: mean KL divergence of the first token from a full prefill, in nats; None where answers are compared.
    """

    recompute_ratio: float
    kept: float
    low: float
    high: float
    charged_budget: float
    kl: float | None = None


@dataclass(frozen=True)
class Tuning:
    """The outcome of a search.

    Attributes:
        best: the smallest ratio found that keeps enough; None if not even the highest does.
        points: all that was measured, by ratio.
        quality: what `kept` is a share of: "exact match" or "first token".
    """

    best: Point | None
    points: list[Point]
    quality: str

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return asdict(self)


def bundled_prompts(count: int, seed: int, model: str | None = None) -> list[Prompt]:
    """Held-out questions of a bundled model's task.

    Args:
        count: how many.
        seed: which.
        model: "chains" for the chain world; all others get the reference world.

    Returns:
        The prompts, with their answers.
    """
    if model == "chains":
        chained = chains.sample_examples(count, seed)
        return [Prompt({"prefix": None, "chunks": list(x.chunks), "question": x.question}, x.answer) for x in chained]
    return [Prompt(pieces_of(one), one.answer) for one in sample_examples(count, seed)]


def read_prompts(path: Path) -> list[Prompt]:
    """Read a sample from a file with one JSON object per line: `chunks`, `question`, and if wanted `prefix`, `answer`.

    Args:
        path: the file.

    Returns:
        The prompts.

    Raises:
        PromptError: the file cannot be read, a line is not such an object, or there is none.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"the prompts {str(path)!r} cannot be read: {error}. Give a JSONL file.") from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PromptError(f"the file {str(path)!r} holds no prompt. Write one JSON object per line.")
    return prompts


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise PromptError(f"line {number} of {str(path)!r} is no JSON: {error}. Correct it.") from error
    if not isinstance(given, dict) or not {"chunks", "question"} <= given.keys():
        raise PromptError(
            f"line {number} of {str(path)!r} is {line[:60]!r}, but an object with chunks and question is wanted."
        )
    return Prompt({name: given.get(name) for name in NAMES}, given.get("answer"))


class Measure:
    """Quality of one blend after another on the same prompts; the full prefills are run once."""

    def __init__(self, model: nn.Module, tokenizer: Any, prompts: Sequence[Prompt], store: ChunkStore) -> None:
        """Run the full prefills.

        Args:
            model: a causal language model.
            tokenizer: its tokenizer.
            prompts: the sample; answers are compared if all have one.
            store: where chunks are kept.
        """
        self._model, self._tokenizer, self._prompts, self._store = model, tokenizer, prompts, store
        self.by_answer = all(prompt.wanted is not None for prompt in prompts)
        by_answer = self.by_answer
        full = [self._answered(FULL_PREFILL, one)[0] if by_answer else self._logits(one) for one in prompts]
        self._full: list[Any] = full

    def __call__(self, config: BlendConfig) -> Point:
        """Measure one config.

        Args:
            config: how to blend.

        Returns:
            What it keeps.
        """
        return self._by_answer(config) if self.by_answer else self._by_token(config)

    def _by_answer(self, config: BlendConfig) -> Point:
        got = [self._answered(Method("blend", config), prompt) for prompt in self._prompts]
        full = sum(map(float, self._full)) / len(self._full) or 1.0
        return self._point(config, [float(right) / full for right, _ in got], [charge for _, charge in got], None)

    @torch.no_grad()
    def _by_token(self, config: BlendConfig) -> Point:
        same, charges, divergences = [], [], []
        for prompt, full in zip(self._prompts, self._full, strict=True):
            cache = BlendCache(self._model, self._store, config)
            inputs = cache.inputs(self._tokenizer, **prompt.pieces)
            logits = self._model(**inputs, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            same.append(float(logits.argmax() == full.argmax()))
            charges.append(cache.report.charged_budget)
            wanted = full.double().log_softmax(-1)
            divergences.append(float((wanted.exp() * (wanted - logits.double().log_softmax(-1))).sum()))
        return self._point(config, same, charges, sum(divergences) / len(divergences))

    @staticmethod
    def _point(config: BlendConfig, kept: list[float], charges: list[float], kl: float | None) -> Point:
        low, high = interval(kept)
        mean = sum(kept) / len(kept)
        return Point(config.recompute_ratio, mean, low, high, sum(charges) / len(charges), kl)

    def _answered(self, method: Method, prompt: Prompt) -> tuple[bool, float]:
        got = answer(self._model, self._tokenizer, self._store, method, prompt.pieces)
        return is_right(got.text, str(prompt.wanted)), got.report.charged_budget if got.report else 1.0

    @torch.no_grad()
    def _logits(self, prompt: Prompt) -> Tensor:
        ids = build(self._tokenizer, prompt.pieces["prefix"], prompt.pieces["chunks"], prompt.pieces["question"]).ids
        device = self._model.get_input_embeddings().weight.device
        logits: Tensor = self._model(torch.tensor([ids], device=device), logits_to_keep=1).logits[0, -1].float()
        return logits


def tune(
    measure: Callable[[BlendConfig], Point],
    config: BlendConfig,
    wanted: float,
    ratios: Iterable[float] = RATIOS,
    tell: Callable[[Point], None] | None = None,
) -> tuple[Point | None, list[Point]]:
    """Search the smallest of some ratios that keeps enough, by halving: quality rises with the ratio, up to noise.

    Args:
        measure: says what a config keeps.
        config: the settings; its ratio is replaced.
        wanted: share of full-prefill quality.
        ratios: those to choose from.
        tell: is told each point.

    Returns:
        The smallest ratio found that keeps enough, or None, and all points by ratio.
    """
    found: dict[float, Point] = {}

    def at(ratio: float) -> Point:
        if ratio not in found:
            found[ratio] = measure(replace(config, recompute_ratio=ratio))
            if tell:
                tell(found[ratio])
        return found[ratio]

    steps = sorted(set(ratios))
    low, high = 0, len(steps) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(steps[middle]).kept >= wanted else (middle + 1, high)
    best = at(steps[low])
    points = [found[ratio] for ratio in sorted(found)]
    return (best if best.kept >= wanted else None), points
