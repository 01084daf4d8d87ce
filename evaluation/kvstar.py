# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of KVStar on one's own model: drafted tokens that are accepted, tokens a second, and answers.

The prompt is prefilled densely; every way then continues it greedily for as many tokens, in turns, sample by sample.
How many drafted tokens were accepted is counted from the tokens that arrive in each round, not by the session that
selects blocks.

Source: KVStar (selections of blocks that a draft and its verification share).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore, plugins, sparse_decoding
from hf_blend.errors import ConfigError
from hf_blend.sparse.config import SparseConfig

from .bootstrap import interval
from .bundled import load_model
from .folder import RunFolder
from .methods.base import Approach, Outcome
from .paper_page import write_paper
from .tasks.base import Sample
from .trial import Trial, _load, _task

METHOD, BLOCK_TOKENS, TEXT_TOKENS, DRAFTED_TOKENS = "kvstar", 16, 24, 4
DENSE = "dense"
CANNOT_SHOW = (
    "what batches or long answers gain: one request at a time, and as many new tokens as `text_tokens` says.",
    "speed on a GPU, or of a model whose decoding is bound by reading K and V: in a small model or a short prompt the "
    "selection costs more than it saves.",
)
ITSELF = (
    "what an independent draft would have accepted: the draft is a copy of the model, which proposes what the model "
    "itself would say. Give a smaller one with --draft."
)
Progress = Callable[[str, Iterator[Any], int], Any]


@dataclass(frozen=True)
class Way:
    """How tokens are made.

    Attributes:
        share: of the context's blocks that a step looks at; 1 is all.
        is_drafted: a draft model proposes tokens.
        is_shared: the draft looks at the blocks that the verification looks at.
        method: that selects blocks.
    """

    share: float = 1.0
    is_drafted: bool = False
    is_shared: bool = False
    method: str = METHOD

    @property
    def name(self) -> str:
        """What tells it from other ways."""
        looks = DENSE if self.share == 1 else f"{self.method} {self.share:g}"
        if not self.is_drafted:
            return looks
        return f"{looks}, {'draft shares the selection' if self.is_shared else 'draft looks at all'}"


def figures_of(is_small: bool = False) -> dict[str, list[Way]]:
    """The ways of each figure."""
    shares = (0.25,) if is_small else (0.5, 0.25, 0.1)
    drafted = shares[:1] if is_small else shares[1:]
    return {
        "decoding": [Way(), *(Way(share) for share in shares)],
        "speculation": [
            Way(is_drafted=True),
            *(Way(share, True, shared) for share in drafted for shared in (True, False)),
        ],
    }


TITLES = {
    "decoding": "Answers and tokens a second, by the share of blocks that a step looks at",
    "speculation": "Drafted tokens that are accepted, with and without shared selections",
}


def kvstar(
    base: Trial, folder: Path, progress: Progress | None = None, is_small: bool = False, draft: str | None = None
) -> dict[str, Any]:
    """Measure what the folder does not hold yet, and write the page.

    Args:
        base: model, tasks, data and limit.
        folder: of the run; one that was stopped resumes.
        progress: wraps the loop over samples.
        is_small: one share.
        draft: path or name of a smaller model with the same tokenizer; None is the model itself.

    Returns:
        `settings`, `cannot_show` and `figures`.

    Raises:
        ConfigError: the draft has another vocabulary.
    """
    model, tokenizer = _load(base.models[0], base)
    assistant, own = load_model(draft or base.models[0], base.device, base.dtype or "auto")
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"the draft {draft!r} has another vocabulary, expected that of {base.models[0]!r}."
        )
    figures = figures_of(is_small)
    sizes = {"parameters": _parameters(model), "draft_parameters": _parameters(assistant)}
    about = {"draft": draft, "block_tokens": BLOCK_TOKENS, "text_tokens": TEXT_TOKENS, "drafted": DRAFTED_TOKENS}
    settings = {**base.settings, **about, **sizes, "is_small": is_small}
    folder.mkdir(parents=True, exist_ok=True)
    ways = list(dict.fromkeys(way for found in figures.values() for way in found))
    with RunFolder(folder / "answers", settings) as opened:
        for name in base.tasks:
            task = _task(base, name, tokenizer)
            samples = task.samples(base.limit, base.shape())
            bench = _Bench((name, base.models[0]), model, assistant, tokenizer, task, opened)
            for sample in progress(name, iter(samples), len(samples)) if progress else samples:
                bench.answer(sample, ways)
        lines = list(opened.lines.values())
    made = [
        {"name": figure, "title": TITLES[figure], "rows": _rows(lines, [way.name for way in found])}
        for figure, found in figures.items()
    ]
    cannot = [*CANNOT_SHOW, *(() if draft else (ITSELF,))]
    result = {"settings": settings, "cannot_show": cannot, "figures": made}
    write_paper(result, folder, "KVStar", ("share", "share of the blocks"))
    return result


@dataclass
class _Rounds:
    """A streamer that notes when tokens arrive, and how many at once."""

    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Take new tokens; the first call brings the prompt."""
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second behind the first that arrived."""
        passed = self.times[-1] - self.times[1] if len(self.times) > 2 else 0.0
        return sum(self.sizes[2:]) / passed if passed else None


class _Stepped(Approach):
    """Continues a prompt."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_new_tokens: int, assistant: nn.Module) -> None:
        super().__init__(model, tokenizer, ChunkStore.open("memory://"), max_new_tokens)
        self._assistant, self.rounds, self.proposed, self.accepted = assistant, _Rounds(), 0, 0

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Not used: a way is given."""
        return [self.continued(samples[0], Way())]

    @torch.no_grad()
    def continued(self, sample: Sample, way: Way) -> Outcome:
        """Prefill a sample and continue it one way."""
        ids = self.inputs([sample])["input_ids"]
        cache = BlendCache(self.model, ChunkStore.open("memory://"))
        self.rounds = _Rounds()
        given: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": TEXT_TOKENS}
        if way.is_drafted:
            given |= {"assistant_model": self._assistant}
        door: AbstractContextManager[Any] = nullcontext()
        if way.share < 1:
            config = SparseConfig(way.share, BLOCK_TOKENS, way.method, recent_blocks=1, min_tokens=0)
            door = sparse_decoding(self.model, cache, config, draft=self._assistant if way.is_shared else None)
        with door:
            made = self.model.generate(
                ids, past_key_values=cache, streamer=self.rounds, pad_token_id=self._pad, **given
            )
        new = made[0, ids.shape[1] :].tolist()
        self._count(way)
        own = self._until_end(new)[: self.max_new_tokens]
        return Outcome(self._text(int(ids[0, -1]), own), tuple(new), None, 1.0, ids.shape[1])

    def _count(self, way: Way) -> None:
        """A round brings what was accepted and one token of the model's own.

        The first is verified in the prefill, which looks at everything, and the last may be cut off: neither counts.
        """
        sizes = self.rounds.sizes
        counted = range(2, len(sizes) - 1) if way.is_drafted else ()
        left = {place: TEXT_TOKENS - sum(sizes[1:place]) for place in counted}  # no more is drafted than still fits
        self.proposed = sum(min(DRAFTED_TOKENS, most - 1) for most in left.values())
        self.accepted = sum(sizes[place] - 1 for place in counted)


class _Bench:
    """One task with one model and its draft."""

    def __init__(
        self, names: tuple[str, str], model: nn.Module, assistant: Any, tokenizer: Any, task: Any, folder: RunFolder
    ) -> None:
        self._names, self._folder = names, folder
        settings = assistant.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = DRAFTED_TOKENS, "constant"
        settings.assistant_confidence_threshold = 0.0
        self._stepped = _Stepped(model, tokenizer, task.max_new_tokens, assistant)
        self._rule = plugins.load("evaluation.scores", task.score)(tokenizer)

    def answer(self, sample: Sample, ways: Sequence[Way]) -> None:
        """Answer a sample every way; nothing if the folder has it."""
        if all((*self._names, way.name, None, sample.id) in self._folder.lines for way in ways):
            return
        lines, dense = [], ()
        for way in ways:
            found, rounds = self._stepped.continued(sample, way), self._stepped.rounds
            dense = dense or found.ids
            lines.append(
                {
                    "task": self._names[0],
                    "model": self._names[1],
                    "method": way.name,
                    "ratio": None,
                    "id": sample.id,
                    "share": way.share,
                    "prediction": found.text,
                    "answers": list(sample.answers),
                    "score": self._rule.best(found.text, sample.answers),
                    "proposed": self._stepped.proposed,
                    "accepted": self._stepped.accepted,
                    "tokens_s": rounds.tokens_s,
                    "prompt_tokens": found.prompt_tokens,
                    "same_text": found.ids == dense,
                }
            )
        self._folder.add(lines)


def _rows(lines: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["task"], line["method"]), {})[line["id"]] = line
    return [
        _row(groups, task, way) for task in dict.fromkeys(task for task, _ in groups) for way in dict.fromkeys(ways)
    ]


def _row(groups: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]], task: str, way: str) -> dict[str, Any]:
    found = list(groups[task, way].values())
    dense = [groups[task, DENSE][line["id"]] for line in found]
    scores = [line["score"] for line in found]
    proposed = sum(line["proposed"] for line in found)
    pairs = [(one["tokens_s"], two["tokens_s"]) for one, two in zip(found, dense, strict=True)]
    speeds = [(own, other) for own, other in pairs if own and other]
    shares = [line["accepted"] / line["proposed"] for line in found if line["proposed"]]
    return {
        "acceptance": sum(line["accepted"] for line in found) / proposed if proposed else None,
        "acceptance_interval": interval(shares) if shares else None,
        "tokens_s": statistics.median(own for own, _ in speeds) if speeds else None,
        "vs_dense": statistics.median(own / other for own, other in speeds) if speeds else None,
        "task": task,
        "way": way,
        "share": found[0]["share"],
        "n": len(found),
        "score": statistics.fmean(scores),
        "interval": interval(scores),
        "difference_to_dense": interval([one - two["score"] for one, two in zip(scores, dense, strict=True)]),
        "same_text": statistics.fmean(float(line["same_text"]) for line in found),
        "proposed": proposed,
        "prompt_tokens": statistics.fmean(line["prompt_tokens"] for line in found),
    }


def _parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())
