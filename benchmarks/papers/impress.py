# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The figures of IMPRESS on one's own model: bytes that are loaded, and what loading a part costs in answers.

Every sample is answered by every way before the next one begins, its chunks computed once. Bytes are those read of the
chunks' blocks, headers and probe heads included, over what the chunks hold: layers up to the check layer, and layers
whose probe heads disagree, are read whole.

Source: IMPRESS (Chen et al., FAST 2025), figures 5, 11 to 15.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, BlendConfig, ChunkStore, plugins
from hf_blend.evaluation.blending import make_method
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.methods.base import Blended, Outcome
from hf_blend.evaluation.summary import interval
from hf_blend.evaluation.tasks.base import Sample
from hf_blend.evaluation.trial import FULL, WARM, EvalConfig, load_task
from hf_blend.model.anatomy import decoder_layers, text_config
from hf_blend.model.identity import fingerprint
from hf_blend.prompt.pieces import front_ids
from hf_blend.sparse.partial.itf import probe_count, similarity, threshold
from hf_blend.sparse.partial.loading import PartialLoading
from hf_blend.sparse.partial.reader import keep_in_blocks
from hf_blend.store.chunk import ChunkKey
from papers.paper_page import Groups, by_way, write_paper

SHARE = 0.25
ALPHA = 0.6
BLOCK_TOKENS = 16
CANNOT_SHOW = (
    "time saved: blocks are read from memory, so times to the first token are those of computing and choosing. Bytes "
    "are what a slow disk would be asked for; `python benchmarks/bench.py partial-load` measures times.",
    "other models: how far heads agree is a property of trained weights. Random weights agree no more than chance.",
)
MemoryTier = plugins.load("store.tiers", "memory")
Progress = Callable[[str, Iterator[Any], int], Any]


@dataclass(frozen=True)
class Way:
    """How stored KV is loaded."""

    share: float = SHARE
    alpha: float = ALPHA
    block_tokens: int = BLOCK_TOKENS
    probes: int | None = None
    is_ordered: bool = False  # by the importance of tokens

    @property
    def name(self) -> str:
        """What tells it from other ways."""
        probes = "own" if self.probes is None else self.probes
        order = ", ordered" if self.is_ordered else ""
        return f"share {self.share:g}, alpha {self.alpha:g}, blocks of {self.block_tokens}, probes {probes}{order}"


WHOLE = Way(share=1.0)
STATIC = Way(probes=0)


def figures_of(kv_heads: int, is_small: bool = False) -> dict[str, list[Way]]:
    """The ways of each figure."""

    def few(values: Sequence[Any]) -> Sequence[Any]:
        return (values[0], values[-1]) if is_small else values

    own = probe_count(kv_heads)
    heads = [None if count == own else count for count in sorted({1, own, max(1, kv_heads // 2), kv_heads})]
    return {
        "share": [WHOLE, *(Way(share=share) for share in few((0.5, 0.25, 0.1))), Way(share=0.1, alpha=2.0)],
        "alpha": [Way(alpha=alpha) for alpha in few((ALPHA, 1.0, 2.0))],
        "probe-heads": [Way(probes=count) for count in few(heads)],
        "block-tokens": [Way(block_tokens=size) for size in few((8, BLOCK_TOKENS, 32))],
        "ablation": [WHOLE, STATIC, Way(), Way(is_ordered=True)],
    }


TITLES = {
    "share": "Share of the blocks: answers against bytes",
    "alpha": "The threshold at which probe heads agree",
    "probe-heads": "How many KV heads are probed",
    "block-tokens": "Tokens of a block (the paper's chunk)",
    "ablation": "Ablation: everything, the first blocks, probe heads, important tokens together",
    "heads": "Jaccard index of the KV heads' important blocks, layer by layer, against chance",
}


def impress(
    base: EvalConfig, folder: Path, progress: Progress | None = None, is_small: bool = False, draft: str | None = None
) -> dict[str, Any]:
    """Measure what the folder does not hold yet, and write the page."""
    model, tokenizer = load_model(base.models[0], base.device, base.dtype or "auto")
    kv_heads = int(text_config(model).num_key_value_heads)
    figures = figures_of(kv_heads, is_small)
    settings = {**base.settings, "kv_heads": kv_heads, "layers": len(decoder_layers(model)), "is_small": is_small}
    folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder / "answers", settings) as opened:
        for name in base.tasks:
            task = load_task(base, name, tokenizer)
            samples = task.samples(base.limit, base.shape())
            bench = _Bench((name, base.models[0]), model, tokenizer, task, opened)
            ways = list(dict.fromkeys([*(way for found in figures.values() for way in found), Way(probes=kv_heads)]))
            loop = progress(name, iter(range(len(samples))), len(samples)) if progress else range(len(samples))
            for number in loop:
                bench.answer(samples[number], ways)
        lines = list(opened.lines.values())
    made = [
        {"name": figure, "title": TITLES[figure], "rows": _rows(lines, [way.name for way in ways])}
        for figure, ways in figures.items()
    ]
    made.append({"name": "heads", "title": TITLES["heads"], "rows": _heads(lines, Way(probes=kv_heads).name)})
    result = {"settings": settings, "cannot_show": list(CANNOT_SHOW), "figures": made}
    write_paper(result, folder)
    return result


class _InPart(Blended):
    """Blending that loads in part."""

    def __init__(self, model: nn.Module, tokenizer: Any, store: Any, max_new_tokens: int, way: Way) -> None:
        super().__init__(model, tokenizer, store, max_new_tokens)
        self.config = BlendConfig(selector="kv-deviation")
        self._way = way
        self.report: dict[str, float] = {}
        self.jaccard: dict[int, tuple[float, float]] = {}

    def answer(self, samples: Sequence[Sample], wanted: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Answer one sample."""
        started = time.perf_counter()
        way = self._way
        prompt = self.prompt(samples[0])
        cache = BlendCache(self.model, self.store, self.config)
        made: list[_Watched] = []
        self.store.part_loader = lambda one: made.append(_Watched(one, way)) or made[-1]
        inputs = cache.inputs(self.tokenizer, prefix=prompt.prefix, chunks=prompt.chunks, question=prompt.question)
        found = self.generate(inputs, cache, wanted, started)
        self.report, self.jaccard = made[0].report, self.jaccard | made[0].jaccard
        return found


class _Watched(PartialLoading):
    """Probes as many heads as a way says, none of them where it takes the first blocks whatever is asked."""

    def __init__(self, cache: BlendCache, way: Way) -> None:
        super().__init__(cache, way.share, way.alpha)
        self._way = way
        self.jaccard: dict[int, tuple[float, float]] = {}

    def _probes(self, kv_heads: int) -> int:
        probes = self._way.probes
        return super()._probes(kv_heads) if probes is None else min(probes, kv_heads)

    def _choose(self, part: Any, question: Any, chunks: Sequence[Any]) -> list[list[int]] | None:
        if self._way.probes == 0:
            readers = [chunk.chunk.layers.reader for chunk in chunks]
            return [list(range(math.ceil(self._share * reader.blocks))) for reader in readers]
        return super()._choose(part, question, chunks)

    def _agreed(self, index: int, scores: Tensor, count: int) -> list[int] | None:
        """Note how far the heads agree on the blocks, and how far chance would."""
        if len(scores) > 1 and count < scores.shape[1]:
            sets = [set(row.topk(count).indices.tolist()) for row in scores]
            self.jaccard[index] = (similarity(sets), threshold(count, scores.shape[1], 1.0))
        return super()._agreed(index, scores, count)


class _Bench:
    """One task with one model."""

    def __init__(self, names: tuple[str, str], model: nn.Module, tokenizer: Any, task: Any, folder: RunFolder) -> None:
        self._names = names
        self._model = model
        self._tokenizer = tokenizer
        self._task = task
        self._folder = folder
        self._rule = plugins.load("evaluation.scores", task.score)(tokenizer)
        self._fingerprint = fingerprint(model)

    @torch.no_grad()
    def answer(self, sample: Sample, ways: Sequence[Way]) -> None:
        """Answer a sample by full prefill and by every way; nothing if the folder has it."""
        if all(
            (*self._names, name, None, sample.id) in self._folder.lines for name in (FULL, *(w.name for w in ways))
        ):
            return
        store = ChunkStore.open("memory://")
        length = self._task.max_new_tokens
        given = (self._model, self._tokenizer, store, length)
        make_method(WARM, None, *given).answer([sample])
        full = make_method(FULL, None, *given).answer([sample])[0]
        lines = [self._line(FULL, sample, full, {})]
        stores: dict[tuple[int, bool], ChunkStore] = {}
        for way in ways:
            where = (way.block_tokens, way.is_ordered)
            if where not in stores:
                stores[where] = self._blocks(store, sample, way)
            loader = _InPart(self._model, self._tokenizer, stores[where], length, way)
            found = loader.answer([sample])[0]
            lines.append(self._line(way.name, sample, found, {**loader.report, "jaccard": loader.jaccard}))
        self._folder.add(lines)

    def _blocks(self, store: ChunkStore, sample: Sample, way: Way) -> ChunkStore:
        """The sample's chunks as blocks, with the important tokens first if that is asked."""
        blocks = ChunkStore(None, [MemoryTier()])
        keep_in_blocks(blocks, way.block_tokens)
        before = (*front_ids(self._tokenizer), *sample.prefix)
        keys = store.keys(self._model, self._tokenizer, sample.chunks)
        for key in [*keys, *([ChunkKey(self._fingerprint, (), before)] if before else [])]:
            chunk = store.get(key)
            if chunk is not None:
                blocks.put(chunk if way.is_ordered else replace(chunk, importance=None, question=""))
        return blocks

    def _line(self, name: str, sample: Sample, found: Outcome, report: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "task": self._names[0],
            "model": self._names[1],
            "method": name,
            "ratio": None,
            "id": sample.id,
            "prediction": found.text,
            "answers": list(sample.answers),
            "score": self._rule.best(found.text, sample.answers),
            "ttft_ms": found.ttft_ms,
            "prompt_tokens": found.prompt_tokens,
            **report,
        }


def _rows(lines: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> list[dict[str, Any]]:
    groups = by_way(lines)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    return [_row(groups, task, way) for task in tasks for way in dict.fromkeys((WHOLE.name, *ways))]


def _row(groups: Groups, task: str, way: str) -> dict[str, Any]:
    """One way; bytes first."""
    found = list(groups[task, way].values())
    full, whole = ([groups[task, name][line["id"]] for line in found] for name in (FULL, WHOLE.name))
    tried = sum(line["partial_layers"] + line["fallback_layers"] for line in found)
    scores = [line["score"] for line in found]
    dense = statistics.fmean(line["score"] for line in whole)
    return {
        "loaded_share": sum(line["loaded_bytes"] for line in found) / max(1, sum(line["all_bytes"] for line in found)),
        "loaded_mb": statistics.fmean(line["loaded_bytes"] for line in found) / 1e6,
        "all_mb": statistics.fmean(line["all_bytes"] for line in found) / 1e6,
        "task": task,
        "way": way,
        "n": len(found),
        "score": statistics.fmean(scores),
        "interval": interval(scores),
        "of_all_loaded": statistics.fmean(scores) / dense if dense else None,
        "difference_to_all_loaded": interval(_gaps(found, whole)),
        "difference_to_full_prefill": interval(_gaps(found, full)),
        "full_prefill_score": statistics.fmean(line["score"] for line in full),
        "fallback_share": sum(line["fallback_layers"] for line in found) / tried if tried else 0.0,
        "whole_layers": statistics.fmean(line["whole_layers"] for line in found),
        "unseen_share": statistics.fmean(line["unseen_share"] for line in found),
        "ttft_ms": statistics.median(line["ttft_ms"] for line in found),
        "full_prefill_ttft_ms": statistics.median(line["ttft_ms"] for line in full),
    }


def _gaps(found: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[float]:
    return [one["score"] - two["score"] for one, two in zip(found, other, strict=True)]


def _heads(lines: Sequence[Mapping[str, Any]], way: str) -> list[dict[str, Any]]:
    """How far all KV heads of a layer agree on the important blocks."""
    rows = []
    for (task, name), found in by_way(lines).items():
        if name != way:
            continue
        seen: dict[int, list[Sequence[float]]] = {}
        for line in found.values():
            for layer, pair in line["jaccard"].items():
                seen.setdefault(int(layer), []).append(pair)
        for layer, pairs in sorted(seen.items()):
            own, chance = (statistics.fmean(column) for column in zip(*pairs, strict=True))
            gaps = interval([one - other for one, other in pairs])
            rows.append(
                {
                    "layer": layer,
                    "jaccard": own,
                    "chance": chance,
                    "difference_to_chance": gaps,
                    "task": task,
                    "n": len(pairs),
                    "agrees_at_alpha_0.6": statistics.fmean(one > other**ALPHA for one, other in pairs),
                }
            )
    return rows
