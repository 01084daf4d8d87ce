# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of KVStar on one's own model: drafted tokens that are accepted, tokens a second, and answers.

The prompt is prefilled densely; every way then continues it greedily, in turns, sample by sample: to the end of the
answer where a task's answers are texts, else for as many tokens. How many drafted tokens were accepted is counted from
what the model is given and what arrives in each round, not by the session that selects blocks.

Source: KVStar (selections of blocks that a draft and its verification share).
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore, observer, plugins, sparse_decoding
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.methods.base import EvalMethod, Outcome
from hf_blend.evaluation.summary import interval
from hf_blend.evaluation.tasks.base import Sample
from hf_blend.evaluation.trial import EvalConfig, load_task
from hf_blend.model.anatomy import cache_among, decoder_layers
from hf_blend.sparse.config import SparseConfig
from hf_blend.sparse.session import SparseSession
from papers.paper_page import Groups, by_way, write_paper

METHOD = "kvstar"
CONTROL = "random"
CONTROL_FILE = str(Path(__file__).parents[1] / "rules" / "random_blocks.py")
BLOCK_TOKENS = 16
TEXT_TOKENS = 24
DRAFTED_TOKENS = 4
DENSE = "dense"
WHOLE = "exact-match"
CANNOT_SHOW = (
    "what batches gain: one request at a time.",
    "speed on a GPU, or of a model whose decoding is bound by reading K and V: in a small model or a short prompt the "
    "selection costs more than it saves.",
    "time to the first token: tokens a second count from the first one on, so the draft's own prefill is not in them.",
)
ITSELF = (
    "what an independent draft would have accepted: the draft is a copy of the model, which proposes what the model "
    "itself would say. Give a smaller one with --draft."
)
Progress = Callable[[str, Iterator[Any], int], Any]
ALONE = ""
APART = "draft looks at all"
SEES = "draft sees the selection"


@dataclass(frozen=True)
class Way:
    """How tokens are made."""

    share: float = 1.0
    draft: str = ALONE
    method: str = METHOD
    lock: bool = True

    @property
    def name(self) -> str:
        """What tells it from other ways."""
        looks = DENSE if self.share == 1 else f"{self.method} {self.share:g}"
        held = () if self.lock else ("not held",)
        return ", ".join((looks, *((self.draft,) if self.draft else ()), *held))

    @property
    def alone(self) -> "Way":
        """The same without a draft."""
        return replace(self, draft=ALONE)


DRAFTED = Way(draft=APART)


def figures_of(is_small: bool = False) -> dict[str, list[Way]]:
    """The ways of each figure."""
    shares, locks = ((0.25,), (False,)) if is_small else ((0.5, 0.25, 0.1), (True, False))
    ways = [(share, how, lock) for share in shares[-2:] for lock in locks for how in (SEES, APART)]
    return {
        "decoding": [Way(), *(Way(share, lock=lock) for share in shares for lock in (True, False))],
        "speculation": [DRAFTED, *(Way(share, how, lock=lock) for share, how, lock in ways)],
        "control": [Way(0.25, how, CONTROL, False) for how in (ALONE, SEES)],
    }


TITLES = {
    "decoding": "Answers and tokens a second, by the share of blocks that a step looks at",
    "speculation": "Drafted tokens that are accepted, with and without shared selections",
    "control": "The same share of blocks, selected at random",
}


def kvstar(
    base: EvalConfig, folder: Path, progress: Progress | None = None, is_small: bool = False, draft: str | None = None
) -> dict[str, Any]:
    """Measure what the folder does not hold yet, and write the page."""
    model, tokenizer = load_model(base.models[0], base.device, base.dtype or "auto")
    assistant, own = load_model(draft or base.models[0], base.device, base.dtype or "auto")
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(f"the draft {draft!r} has another vocabulary, expected that of {base.models[0]!r}.")
    figures = figures_of(is_small)
    sizes = {"parameters": _parameters(model), "draft_parameters": _parameters(assistant)}
    layers = {"layers": len(decoder_layers(model)), "draft_layers": len(decoder_layers(assistant))}
    about = {"draft": draft, "block_tokens": BLOCK_TOKENS, "text_tokens": TEXT_TOKENS, "drafted": DRAFTED_TOKENS}
    settings = {**base.settings, **about, **sizes, **layers, "is_small": is_small}
    folder.mkdir(parents=True, exist_ok=True)
    ways = list(dict.fromkeys(way for found in figures.values() for way in found))
    with RunFolder(folder / "answers", settings) as opened:
        for name in base.tasks:
            task = load_task(base, name, tokenizer)
            samples = task.samples(base.limit, base.shape())
            bench = _Bench((name, base.models[0]), model, assistant, tokenizer, task, opened)
            for sample in progress(name, iter(samples), len(samples)) if progress else samples:
                bench.answer(sample, ways)
        lines = list(opened.lines.values())
    made = [
        {"name": figure, "title": TITLES[figure], "rows": _rows(lines, found)} for figure, found in figures.items()
    ]
    cannot = [*CANNOT_SHOW, *(() if draft else (ITSELF,))]
    result = {"settings": settings, "cannot_show": cannot, "figures": made}
    write_paper(result, folder)
    return result


@dataclass
class _Rounds:
    """A streamer that notes when tokens arrive, and how many at once."""

    cache: Any
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Take new tokens; the first call brings the prompt."""
        self.sizes.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the model begins."""
        if cache_among(kwargs) is self.cache:
            self.given.append(kwargs["input_ids"].shape[1])

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second behind the first that arrived."""
        passed = self.times[-1] - self.times[1] if len(self.times) > 2 else 0.0
        return sum(self.sizes[2:]) / passed if passed else None

    @property
    def proposed(self) -> int:
        """Drafted tokens; those that were verified in the prefill, which looks at everything, do not count."""
        return sum(self.given[1:]) - len(self.given[1:])

    @property
    def accepted(self) -> int:
        """Of these, the accepted ones: a round brings them and one token of the model's own."""
        return sum(self.sizes[2:]) - len(self.sizes[2:])


class _Looking:
    """Counts the keys that a session's steps look at."""

    def __init__(self, session: SparseSession) -> None:
        self.looked = self.all = 0
        self._select_kv = session.select_kv
        vars(session)["select_kv"] = self.select_kv  # before the method of the class

    def select_kv(self, index: int, query: Tensor, key: Tensor, *given: Any) -> Any:
        """In place of `SparseSession.select_kv`."""
        found = self._select_kv(index, query, key, *given)
        self.all += key.shape[2]
        self.looked += (found[0] if found else key).shape[2]
        return found


class _Stepped(EvalMethod):
    """Continues a prompt."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_new_tokens: int, assistant: nn.Module) -> None:
        super().__init__(model, tokenizer, ChunkStore.open("memory://"), max_new_tokens)
        self._assistant, self.rounds = assistant, _Rounds(None)
        self.looking: _Looking | None = None

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Not used: a way is given."""
        return [self.continued(samples[0], Way())]

    @torch.no_grad()
    def continued(self, sample: Sample, way: Way) -> Outcome:
        """Prefill a sample and continue it one way."""
        ids = self.inputs([sample])["input_ids"]
        cache = BlendCache(self.model, ChunkStore.open("memory://"))
        rounds = self.rounds = _Rounds(cache)
        given: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": TEXT_TOKENS}
        if way.draft:
            given |= {"assistant_model": self._assistant}
        door: AbstractContextManager[Any] = nullcontext()
        if way.share < 1:
            method = CONTROL_FILE if way.method == CONTROL else way.method
            config = SparseConfig(way.share, BLOCK_TOKENS, method, recent_blocks=1, min_tokens=0, lock=way.lock)
            draft = self._assistant if way.draft == SEES else None
            door = sparse_decoding(self.model, cache, config, draft=draft)
        noting = self.model.register_forward_pre_hook(observer(rounds.note), with_kwargs=True)
        try:
            with door as session:
                self.looking = _Looking(session) if session else None
                given |= {"past_key_values": cache, "streamer": rounds, "pad_token_id": self._pad}
                made = self.model.generate(ids, **given)
        finally:
            noting.remove()
        new = made[0, ids.shape[1] :].tolist()
        own = self._until_end(new)[: self.max_new_tokens]
        return Outcome(self._text(int(ids[0, -1]), own), tuple(new), None, 1.0, ids.shape[1])


class _Bench:
    """One task with one model and its draft."""

    def __init__(
        self, names: tuple[str, str], model: nn.Module, assistant: Any, tokenizer: Any, task: Any, folder: RunFolder
    ) -> None:
        self._names = names
        self._folder = folder
        settings = assistant.generation_config
        settings.num_assistant_tokens = DRAFTED_TOKENS
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        self._stepped = _Stepped(model, tokenizer, task.max_new_tokens, assistant)
        self._rule, self._whole = (plugins.load("evaluation.scores", one)(tokenizer) for one in (task.score, WHOLE))

    def answer(self, sample: Sample, ways: Sequence[Way]) -> None:
        """Answer a sample every way; nothing if the folder has it."""
        if all((*self._names, way.name, None, sample.id) in self._folder.lines for way in ways):
            return
        lines = []
        dense = ()
        for way in ways:
            found = self._stepped.continued(sample, way)
            rounds = self._stepped.rounds
            looking = self._stepped.looking
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
                    "whole": self._whole.best(found.text, sample.answers),
                    "proposed": rounds.proposed,
                    "accepted": rounds.accepted,
                    "tokens_s": rounds.tokens_s,
                    "looked_share": looking.looked / looking.all if looking and looking.all else 1.0,
                    "prompt_tokens": found.prompt_tokens,
                    "same_text": found.ids == dense,
                }
            )
        self._folder.add(lines)


def _rows(lines: Sequence[Mapping[str, Any]], ways: Sequence[Way]) -> list[dict[str, Any]]:
    groups = by_way(lines)
    return [_row(groups, task, way) for task in dict.fromkeys(task for task, _ in groups) for way in ways]


def _row(groups: Groups, task: str, way: Way) -> dict[str, Any]:
    found = list(groups[task, way.name].values())
    scores = [line["score"] for line in found]
    proposed, accepted = (sum(line[name] for line in found) for name in ("proposed", "accepted"))
    acceptance = accepted / proposed if proposed else None
    control = replace(way, method=CONTROL)

    def against(other: Way) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return [(line, groups[task, other.name][line["id"]]) for line in found]

    def gap(other: Way) -> Any:
        return interval([one["score"] - two["score"] for one, two in against(other)])

    def faster(other: Way) -> float | None:
        pairs = [(one["tokens_s"], two["tokens_s"]) for one, two in against(other)]
        ratios = [one / two for one, two in pairs if one and two]
        return statistics.median(ratios) if ratios else None

    speeds = [line["tokens_s"] for line in found if line["tokens_s"]]
    return {
        "acceptance": acceptance,
        "acceptance_interval": None if acceptance is None else _ratio_interval(found, acceptance),
        "tokens_s": statistics.median(speeds) if speeds else None,
        "vs_dense": faster(Way()),
        "vs_dense_draft": faster(DRAFTED),
        "task": task,
        "way": way.name,
        "share": way.share,
        "looked_share": statistics.fmean(line["looked_share"] for line in found),
        "n": len(found),
        "score": statistics.fmean(scores),
        "interval": interval(scores),
        "difference_to_dense": gap(Way()),
        "difference_to_no_draft": gap(way.alone) if way.draft else None,
        "difference_to_random": gap(control) if control.name != way.name and (task, control.name) in groups else None,
        "whole_right": statistics.fmean(line["whole"] for line in found),
        "same_text": statistics.fmean(float(line["same_text"]) for line in found),
        "proposed": proposed,
        "prompt_tokens": statistics.fmean(line["prompt_tokens"] for line in found),
    }


def _ratio_interval(lines: Sequence[Mapping[str, Any]], ratio: float) -> tuple[float, float]:
    """Of accepted over proposed tokens of all samples: each sample's part in the ratio, linearised, is resampled."""
    mean = statistics.fmean(line["proposed"] for line in lines)
    return interval([ratio + (line["accepted"] - ratio * line["proposed"]) / mean for line in lines])


def _parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())
